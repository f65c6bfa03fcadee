"""Plan of `outlast run --resume`: the command of an earlier start, as its run directory has it.

Nodes of a run give it on each of them. The stored plan is that of the node with the controller:
what belongs to that node alone is found anew.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import msgspec

from outlast import config
from outlast.cli.newest_run import LAST, chosen_run
from outlast.errors import RunDirError, UsageError
from outlast.launch.nodes.node_flags import ANY_RANK
from outlast.launch.torchrun_arguments import RunPlan, read_plan

_FLAG = "--resume"
_SHOWN = {"--json": "json", "--plain": "plain"}  # flags that may differ from those of the run


def resumed_plan(argv: list[str]) -> RunPlan | None:
    """Return the plan of the run that `argv` resumes, or None for another command line. Changes to
    the working directory of the run.

    Raises UsageError for flags that a resumed run cannot take, RunDirError if the run is unknown.
    """
    before = list(itertools.takewhile(_SHOWN.__contains__, argv))
    first, *others = argv[len(before) :] or [""]
    name, _, value = first.partition("=")
    if name != _FLAG:
        return None
    config.check_torch()
    if not value:
        value = others.pop(0) if others and not others[0].startswith("-") else str(LAST)
    run_dir = chosen_run(Path(value)).absolute()
    if strange := [each for each in others if each not in _SHOWN]:
        raise UsageError(
            f"{strange[0]} cannot follow {_FLAG} {value}, which takes script and flags from the run"
            f" directory (only {' and '.join(_SHOWN)} may differ); nothing was started; to change"
            f" others, give the whole command with --run-dir {run_dir}"
        )
    stored = read_plan(run_dir)
    node = stored.plan.node
    if node.local_addr:
        raise UsageError(
            f"{run_dir} is of a run of {node.total} nodes with --local-addr {node.local_addr}, an"
            f" address of one of them: resume it by its command, on all nodes, with --run-dir"
            f" {run_dir}; nothing was started"
        )
    try:
        os.chdir(stored.cwd)
    except OSError as error:
        raise RunDirError(
            f"the working directory of the run, {stored.cwd}, cannot be entered"
            f" ({error.strerror}); nothing was started"
        ) from error
    shown = {field: flag in [*before, *others] for flag, field in _SHOWN.items()}
    node = msgspec.structs.replace(node, node_rank=ANY_RANK)  # the endpoint's owner leads
    return msgspec.structs.replace(stored.plan, run_dir=str(run_dir), node=node, **shown)
