"""`outlast roll`: let the hosts of a running job leave and come back, one after the other."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.cli.maintenance_train import MaintenanceTrain, RollAnswer, rest_of
from outlast.cli.output_stream import echo, print_json
from outlast.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    ConfigError,
    RunDirError,
    UsageError,
)
from outlast.launch.notices import drain_requests, roll_record
from outlast.launch.terms.run_identity import RunningJob
from outlast.launch.torchrun_arguments import RunPlan, read_plan
from outlast.telemetry.event_store import POLL_S
from outlast.text_formatting import duration

WAIT_S = 3600.0


def roll(
    run_dir: Path,
    *,
    hosts: str = "",
    every: Annotated[bool, Parameter(name="--all", negative="")] = False,
    pause: str = "0s",
    cancel: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    timeout_s: Annotated[float, Parameter(name="--timeout")] = WAIT_S,
) -> int:
    """Let hosts of a running job leave for maintenance and come back in turn.

    The ranks of a host move to spares of other hosts between two steps. Then the
    host leaves the run: its launcher ends with exit code 0, and it may be serviced.
    The next host leaves when the same `outlast run` command was started again on
    it, or on a fresh host, and its spares are warm. Where the host has the
    controller, another one takes over.

    Ctrl-C stops the command; given again, it goes on. Exit code 1: not all hosts
    have left and come back; the reason is printed.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start.
    hosts
        Hosts as `outlast events` names them, separated by commas, in this order.
    every
        All hosts of the run: first those without ranks, last that of the controller.
    pause
        Time from the return of a host until the next one leaves, such as 60s or 10min.
    cancel
        End a roll, also one that runs on another host. A host that has left stays
        away until its command is started again.
    json
        Print the answer as JSON, and nothing meanwhile.
    timeout_s
        Time limit in seconds for each wait: for spares, a move, a return.
    """
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout {timeout_s}: must be a number of seconds above 0")
    pause_s = quantities.measured(quantities.SECONDS, f"--pause {pause}", pause, "60s")
    if cancel:
        if hosts or every:
            raise UsageError("--cancel ends the roll of this run: leave out --hosts and --all")
        return _tell(_cancel(run_dir, timeout_s), json)
    if bool(hosts) == every:
        raise UsageError("give either --hosts or --all")
    plan, job = _read_run(run_dir)
    show = (lambda _text: None) if json else echo
    with roll_record.lock(run_dir) as is_free:
        if not is_free:
            before = roll_record.read(run_dir)
            where = f" ({before.driver})" if before else ""
            raise RunDirError(
                f"{run_dir}: another roll is running{where}; nothing was requested; 'outlast roll"
                f" {run_dir} --cancel' ends it"
            )
        train = MaintenanceTrain(run_dir, plan, job, timeout_s, show)
        train.begin(hosts, every=every)
        with _closing(train):
            return _tell(train.run(pause_s), json)


def _tell(answer: RollAnswer, json: bool) -> int:
    """Print an answer; return the exit code."""
    if json:
        print_json(answer)
    else:
        echo(answer.text)
    is_whole = answer.outcome == "done" or (answer.outcome == "cancelled" and not answer.hosts)
    return EXIT_DONE if is_whole else EXIT_USER_ERROR


def _cancel(run_dir: Path, timeout_s: float) -> RollAnswer:
    """End the roll of a run, wherever its command runs."""
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir}: no such directory; nothing was changed")
    if not roll_record.exists(run_dir):
        return RollAnswer(outcome="cancelled", text="there is no roll; nothing was changed")
    roll_record.request_cancel(run_dir)
    end_s, pause = time.monotonic() + timeout_s, threading.Event()
    while time.monotonic() < end_s:
        with roll_record.lock(run_dir) as is_free:
            if is_free:
                drain_requests.withdraw_leaves(run_dir, "")
                away: list[str] = []
                with contextlib.suppress(RunDirError):  # unreadable: it is removed
                    record = roll_record.read(run_dir)
                    away = record.names("away") if record else []
                roll_record.remove(run_dir)
                return RollAnswer(outcome="cancelled", text=f"the roll has ended{rest_of(away)}")
        pause.wait(POLL_S)
    raise RunDirError(f"the command that runs the roll has not ended within {duration(timeout_s)}")


def _read_run(run_dir: Path) -> tuple[RunPlan, RunningJob]:
    """Return plan and identity of a run whose hosts can leave. Raises RunDirError, ConfigError."""
    plan = read_plan(run_dir).plan
    if plan.node.total < 2:
        raise ConfigError(
            f"{run_dir}: the run has one host (--nnodes {plan.node.total}), which cannot leave it;"
            " nothing was requested; 'outlast drain --rank R' moves a rank, and SIGTERM to the"
            f" launcher ends the run so that 'outlast run --resume {run_dir}' resumes it"
        )
    try:
        job = msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunningJob)
    except (OSError, msgspec.DecodeError) as error:
        raise RunDirError(f"{run_dir / 'run.json'} cannot be read ({error})") from error
    if job.home:
        raise ConfigError(
            f"{run_dir}: each host of this run has its own run directory, so that requests do not"
            " reach a later controller; nothing was requested; 'outlast drain --host H' moves the"
            " ranks of one host"
        )
    return msgspec.structs.replace(plan, run_dir=str(run_dir)), job  # the plan's may be relative


@contextlib.contextmanager
def _closing(train: MaintenanceTrain) -> Iterator[None]:
    """Take back what was asked of a host that has not left, at Ctrl-C and at errors."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RunDirError):
            train.withdraw()
        if isinstance(error, KeyboardInterrupt):
            echo(train.stand())
        raise
