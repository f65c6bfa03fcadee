"""Commands of workers, as torchrun builds them of its flags."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from string import Template

from outlast import config
from outlast.errors import UsageError

_TEXT_BYTES_MAX = 1 << 20
# torchrun's --run-path: the script has no folder of its own on sys.path, and its exception is
# recorded as by @record.
_RUN_PATH = (
    "import runpy, sys; from torch.distributed.elastic.multiprocessing.errors import record;"
    " sys.argv = sys.argv[1:]; record(runpy.run_path)(sys.argv[0], run_name='__main__')"
)


def worker_command(given: Namespace, spares: int) -> tuple[str, ...]:
    """Return the command of a worker, for `with_local_rank`. Raises UsageError if it cannot be
    executed, or names the local rank and there are spares."""
    command = _command(given)
    if spares and with_local_rank(command, 0) != with_local_rank(command, 1):
        raise UsageError(
            "${local_rank} in the script's arguments cannot be replaced for spares, which take any"
            " rank; let the script read LOCAL_RANK, or leave --spares out"
        )
    return command


def _command(given: Namespace) -> tuple[str, ...]:
    script, args = given.training_script, given.training_script_args
    if given.module and given.no_python and not given.run_path:
        raise UsageError("--no-python and --module exclude each other; leave one out")
    if given.no_python and not given.run_path:
        if shutil.which(script) is None:
            raise UsageError(f"cannot execute {script}: no such program; check its path")
        return (script, *args)
    python = config.python_executable()
    if given.module and not given.run_path:
        top = script.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"cannot find module {script}; check its name and PYTHONPATH")
        return (python, "-u", "-m", script, *args)
    if not Path(script).is_file():
        raise UsageError(f"cannot find training script {script}; check its path")
    if given.run_path:
        return (python, "-u", "-c", _RUN_PATH, script, *args)
    return (python, "-u", script, *args)


def with_local_rank(command: tuple[str, ...], local_rank: int) -> tuple[str, ...]:
    """Return the command of one worker: torchrun replaces ${local_rank} in arguments, and $$."""
    program, *args = command
    return (program, *(Template(arg).safe_substitute(local_rank=local_rank) for arg in args))


def names_outlast(script: str) -> bool | None:
    """Return whether a script's text contains "outlast"; None for a module, or a program on the
    search path, which are not read."""
    try:
        return b"outlast" in Path(script).read_bytes()[:_TEXT_BYTES_MAX]
    except OSError:
        return None


def is_unmodified(script: str) -> bool:
    """Return whether a script is a Python file that does not name Outlast. Several nodes start it
    as a group, and a script that is not read as one that calls ``outlast.init()``."""
    return script.endswith(".py") and names_outlast(script) is False


def may_be_unmodified(script: str, nodes: int) -> bool:
    """Return whether a script may turn out not to call ``outlast.init()``."""
    return is_unmodified(script) if nodes > 1 else not names_outlast(script)


def can_be_forked(command: tuple[str, ...]) -> bool:
    """Return whether all workers run one Python file or module by the same command."""
    is_python = command[1:2] == ("-u",) and command[2] != "-c"
    return is_python and with_local_rank(command, 0) == command
