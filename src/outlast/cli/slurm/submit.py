"""`outlast slurm submit`: a run as a Slurm job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from outlast import config
from outlast.cli.output_stream import echo, print_json, write
from outlast.errors import EXIT_DONE, UsageError
from outlast.launch import torchrun_arguments
from outlast.launch.batch_file import NOTICE_S, BatchJob, batch_file
from outlast.launch.nodes import node_flags

NOTICE = "USR2"  # not that of scancel and of preemptions, which leave other times
_SUBMIT_S = 60.0


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `job`: its number; "" with `--print`."""

    job: str
    script: str


def submit(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    time_limit: Annotated[str, Parameter(name="--time")] = "",
    name: str = "",
    notice: int = NOTICE_S,
    sbatch: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True, negative=())] = (),
    print_: Annotated[bool, Parameter(name="--print", negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Submit `outlast run` as a Slurm job that resumes itself.

    Slurm sends a signal before the time limit: on one node SIGUSR2, which the run
    takes as a notice (it saves, trains on, and ends behind a second checkpoint
    while there is time), on several nodes SIGTERM (it saves and ends). The job
    requeues itself and resumes, until the script has ended.

    Parameters
    ----------
    command
        Behind --: the command line of `outlast run`, without `outlast run`.
    time_limit
        Time limit of one attempt, as Slurm reads it (HH:MM:SS, DAYS-HH:MM:SS).
    name
        Name of the job (default: that of the script).
    notice
        Seconds from the signal to the time limit: for one step and one checkpoint.
    sbatch
        An option of sbatch, such as --sbatch=--partition=gpu. Repeatable.
    print_
        Print the batch file, and submit nothing.
    json
        Print one JSON object.
    """
    given = torchrun_arguments.read_flags(list(command))
    own_run_dir, own_endpoint = bool(given.run_dir), bool(given.rdzv_endpoint)
    given.run_dir = given.run_dir or "runs"  # the batch file names both
    given.rdzv_endpoint = given.rdzv_endpoint or f"first:{node_flags.PORT}"
    nodes = node_flags.read(given, "").total
    if not (given.module or given.no_python or Path(given.training_script).is_file()):
        raise UsageError(
            f"cannot find training script {given.training_script}; nothing was submitted; check"
            " its path"
        )
    stem = Path(given.training_script).stem
    # Slurm does not signal the launcher of the first of several nodes, whose host would be
    # the only one without a notice.
    own = nodes > 1 or bool(given.notice_signal)
    flags = () if own else (f"--notice-signal={NOTICE}", f"--notice-time={notice}s")
    text = batch_file(
        BatchJob(
            name=name or re.sub(r"[^A-Za-z0-9._+-]", "_", stem).lstrip("._+-")[:64] or "outlast",
            command=(sys.executable, "-m", "outlast", "run", *flags, *command),
            own_run_dir=own_run_dir,
            own_endpoint=own_endpoint,
            nodes=nodes,
            time_limit=time_limit,
            notice_s=notice,
            signal=NOTICE if flags else "TERM",
            options=sbatch,
        )
    )
    job = "" if print_ else _submit(text)
    if json:
        print_json(Submission(job=job, script=text))
    elif print_:
        write(text)
    else:
        echo(f"job {job} was submitted; its output will be in slurm-{job}.out")
    return EXIT_DONE


def _submit(text: str) -> str:
    """Return the number of the new job. Raises UsageError with sbatch's own message."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_S,
            check=False,
            env=config.child_environment({}),
        )
    except FileNotFoundError as error:
        raise UsageError(
            "sbatch is not installed here; nothing was submitted; print the file with --print, and"
            " submit it where Slurm is"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"sbatch did not answer within {_SUBMIT_S:.0f} s; the job may have been submitted:"
            " squeue --me lists it"
        ) from error
    if done.returncode:
        raise UsageError(
            f"sbatch refused the job, and nothing was submitted: {done.stderr.strip()}"
        )
    return done.stdout.strip().partition(";")[0]  # of several clusters: JOB;CLUSTER
