"""`outlast ckpt now`: request of a checkpoint from a running job."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE, ConfigError, RunDirError, StorageError
from outlast.events import (
    AnyEvent,
    CheckpointFailed,
    CheckpointSaved,
    GenerationOpened,
    Note,
    PhaseDone,
    RunEnded,
)
from outlast.launch import run_directory
from outlast.telemetry.event_store import POLL_S, EventReader
from outlast.text_formatting import duration, size


class SaveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `waited_s`: from the request until a durable checkpoint was reported."""

    path: str
    step: int
    n: int
    size_bytes: int
    waited_s: float


def now(
    run_dir: Path,
    *,
    timeout_s: Annotated[float, Parameter(name="--timeout")] = 600.0,
    json: bool = False,
) -> int:
    """Request a checkpoint from a running job, and wait for it.

    The job continues to train. The checkpoint holds all steps that were complete at
    the request.

    Exit code 1: no checkpoint; the reason is printed.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start.
    timeout_s
        Time limit in seconds. The request remains in force after it.
    json
        Print one JSON object.
    """
    if not timeout_s > 0:
        raise ConfigError(f"--timeout {timeout_s}: must be above 0 seconds")
    reader = EventReader(run_dir)
    wait = _Wait(run_dir, reader.poll())
    began = time.monotonic()
    pid = run_directory.request_save_by_signal(run_dir)
    pause = threading.Event()
    while True:
        is_dead = (
            run_directory.holder(run_dir) is None
        )  # read first: a launcher writes its last events before it ends
        for event in reader.poll():
            if saved := wait.take(event):
                _tell(saved, time.monotonic() - began, json)
                return EXIT_DONE
        if is_dead:
            raise RunDirError(
                f"{run_dir}: its launcher (pid {pid}) has died before it could save; the same"
                " `outlast run` command resumes the run from its newest checkpoint"
            )
        if time.monotonic() - began > timeout_s:
            raise RunDirError(
                f"{run_dir}: no checkpoint after {duration(timeout_s)}; the request remains in"
                f" force: `outlast ckpt ls {run_dir}` lists it when it is complete"
            )
        pause.wait(POLL_S)


class _Wait:
    """Match of events to the request: the first checkpoint with all that was committed by then."""

    def __init__(self, run_dir: Path, before: Iterable[AnyEvent]) -> None:
        self._run_dir = run_dir
        self._done_n = 0
        for event in before:
            if isinstance(event, GenerationOpened):
                self._done_n = event.n  # a rollback may have lowered it
            elif isinstance(event, PhaseDone) and event.kind != "checkpoint":
                self._done_n = max(self._done_n, event.n)

    def take(self, event: AnyEvent) -> CheckpointSaved | None:
        """Return the report if this event answers the request, else None.

        Raises StorageError or RunDirError for an event that reports a failure.
        """
        if isinstance(event, GenerationOpened):
            self._done_n = min(self._done_n, event.n)
        elif isinstance(event, CheckpointSaved) and event.n >= self._done_n:
            return event
        elif isinstance(event, CheckpointFailed) and event.n >= self._done_n:
            raise StorageError(
                f"the checkpoint of step {event.step} failed: {event.error}; the run continues, and"
                " older checkpoints are untouched"
            )
        elif isinstance(event, Note) and event.text == run_directory.SAVE_REFUSED:
            raise RunDirError(
                f"{self._run_dir}: nothing was saved: the script has not called outlast.init()"
            )
        elif isinstance(event, RunEnded):
            raise RunDirError(
                f"{self._run_dir}: the run ended ({event.outcome}, step {event.step}) before it"
                " could save"
            )
        return None


def _tell(saved: CheckpointSaved, waited_s: float, json: bool) -> None:
    if json:
        print_json(
            SaveReport(
                path=saved.path,
                step=saved.step,
                n=saved.n,
                size_bytes=saved.size_bytes,
                waited_s=waited_s,
            )
        )
    else:
        after = duration(waited_s)
        echo(f"step {saved.step}, {size(saved.size_bytes)}, durable after {after}: {saved.path}")
