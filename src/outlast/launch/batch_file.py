"""Batch files for Slurm: plain bash that starts `outlast run`, and requeues what can be resumed.

docs/slurm.md says what a job of such a file promises.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from outlast.errors import EXIT_INTERRUPTED, UsageError
from outlast.launch.nodes.node_flags import PORT, RELEASE_VARIABLE

NOTICE_S = 120
_TIME = re.compile(
    r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
_FILE = """\
#!/bin/bash
# `outlast run` as a Slurm job that resumes itself: written by `outlast slurm submit`,
# yours to read and to change.
@DIRECTIVES@

# scancel sends SIGTERM to this shell as well: such a job is not requeued.
cancelled=no
trap 'cancelled=yes' TERM

@START@

# The run was interrupted and has saved a checkpoint: the next attempt resumes from it.
if [ "$code" -eq @INTERRUPTED@ ] && [ "$cancelled" = no ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 300 # Slurm ends this shell
fi
exit "$code"
"""
_ONE_NODE = """\
srun --ntasks=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \\
  @COMMAND@
code=$?"""
_NODES = """\
# All nodes share a secret, and meet at the first one, which holds the controller.
export OUTLAST_TOKEN_FILE=${OUTLAST_TOKEN_FILE:-"runs/slurm-$SLURM_JOB_ID.token"}
if [ ! -s "$OUTLAST_TOKEN_FILE" ]; then
  mkdir -p "$(dirname "$OUTLAST_TOKEN_FILE")"
  (umask 077 && od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$OUTLAST_TOKEN_FILE")
fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
command=(@COMMAND@)

# A lost node does not end the job. The exit code is that of the first node.
srun --nodes=@OTHERS@ --ntasks=@OTHERS@ --relative=1 --no-kill --kill-on-bad-exit=0 \\
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${command[@]}" &
others=$!
@RELEASE@=@LEFT@ "${command[@]}"
code=$?
# The first node has left the run (`outlast roll`), and the others go on with it.
if [ "$code" -eq @LEFT@ ]; then
  wait "$others"
  code=$?
  while kill -0 "$others" 2> /dev/null; do # a signal ends `wait` early
    wait "$others"
    code=$?
  done
fi"""
_LEFT = 5  # of the first node's launcher; other nodes end with 0 then, as their step requires


class BatchJob(NamedTuple):
    """A job. `command`: what starts the launcher; `options`: further options of sbatch."""

    name: str
    command: Sequence[str]
    own_run_dir: bool  # the command names a run directory
    own_endpoint: bool = False  # ... an endpoint
    nodes: int = 1  # with spare ones
    time_limit: str = ""  # as Slurm reads it; "": the partition's
    notice_s: int = NOTICE_S  # from the signal to the time limit
    signal: str = "TERM"  # before the time limit
    options: Sequence[str] = ()


def batch_file(job: BatchJob) -> str:
    """Return the file. Raises UsageError for what sbatch or bash would read otherwise."""
    if not _NAME.fullmatch(job.name):
        raise UsageError(
            f"--name {job.name!r}: a job's name has letters, digits and . _ + - (64 at most)"
        )
    if job.time_limit and not _TIME.fullmatch(job.time_limit):
        raise UsageError(
            f"--time {job.time_limit!r} is no time of Slurm's: give minutes, HH:MM:SS or"
            " DAYS-HH:MM:SS"
        )
    if not 0 < job.notice_s <= 65535:
        raise UsageError(f"--notice {job.notice_s}: give 1 to 65535 seconds")
    for option in job.options:
        if not _OPTION.fullmatch(option) or not option.isprintable():
            raise UsageError(
                f"--sbatch {option!r} is no option of sbatch's on one line; give it as"
                " --sbatch=--partition=gpu"
            )
    words = [_quoted(word) for word in job.command]
    if not job.own_run_dir:
        words.insert(_RUN_AT, '--run-dir "runs/slurm-$SLURM_JOB_ID"')
    if job.nodes > 1 and not job.own_endpoint:
        words.insert(_RUN_AT, f'--rdzv-endpoint "$first:{PORT}"')
    start = _filled(
        _NODES if job.nodes > 1 else _ONE_NODE,
        COMMAND=" ".join(words),
        OTHERS=str(job.nodes - 1),
        RELEASE=RELEASE_VARIABLE,
        LEFT=str(_LEFT),
    )
    return _filled(
        _FILE,
        DIRECTIVES="\n".join(f"#SBATCH {each}" for each in _directives(job)),
        START=start,
        INTERRUPTED=str(EXIT_INTERRUPTED),
    )


def _filled(template: str, **values: str) -> str:
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], template)


_RUN_AT = 4  # behind `python -m outlast run`


def _directives(job: BatchJob) -> list[str]:
    time_limit = [f"--time={job.time_limit}"] if job.time_limit else []
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *(["--no-kill"] if job.nodes > 1 else []),
        *time_limit,
        f"--signal={job.signal}@{job.notice_s}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
        *map(_directive, job.options),
    ]


def _directive(option: str) -> str:
    """Return an option as sbatch reads it from a line: quoted if it has blanks or quotes."""
    flag, equals, value = option.partition("=")
    if not equals or re.fullmatch(r"[\w@%+:,./=\[\]-]*", value):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{flag}="{escaped}"'


def _quoted(word: str) -> str:
    """Return a word that bash reads as it is. Raises UsageError for one with a NUL byte."""
    if "\0" in word:
        raise UsageError("the command has a NUL byte, which no program can be given")
    return shlex.quote(word)
