"""Two fresh runs of one job from one checkpoint to the same step."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import OutlastError, RunDirError, StorageError
from outlast.events import CheckpointFailed
from outlast.launch.launcher import launch
from outlast.launch.plan_file import PlanFile
from outlast.launch.run_branching import branch
from outlast.launch.run_display import DetachedDisplay
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import read_events
from outlast.telemetry.live_view import display
from outlast.text_formatting import frame_cause

_FOLDER = "replay"
Say = Callable[[str], None]


class ReplayRuns(NamedTuple):
    """Paths of the two replays, below the run that they repeat."""

    first: Path
    second: Path


class Start(NamedTuple):
    """Range of a replay: a run, from one of its checkpoints, up to a step."""

    run_dir: Path
    place: SavePoint
    until_step: int
    planned: PlanFile

    @property
    def plan(self) -> RunPlan:
        """Return the run's own launch plan, quiet and without what would disturb a replay."""
        original = self.planned.plan
        return msgspec.structs.replace(
            original, spares=0, faults=(), checkpoint_every=0, snapshot_every=0, durable=(),
            until_step=self.until_step, master_port=None, log_dir=None, json=False,
            on_save_failure="stop", streams=dict.fromkeys(range(original.world), 0),
        )  # fmt: skip


@contextlib.contextmanager
def room_for(start: Start, size_bytes: int) -> Iterator[tuple[ReplayRuns, Say]]:
    """Yield two names for run directories below the run's, and a function that keeps them.

    Directories not kept are removed at the end, whatever that end is. Raises StorageError where two
    checkpoints of `size_bytes` have no room, RunDirError where nothing can be written.
    """
    above = start.run_dir / _FOLDER
    folder = above / f"step-{start.place.step}-{time.strftime('%Y%m%d-%H%M%S')}"
    free_bytes = shutil.disk_usage(start.run_dir).free
    if free_bytes < 2 * size_bytes:
        raise StorageError(
            f"two replays write a checkpoint of {size_bytes} bytes each, and {start.run_dir} has"
            f" {free_bytes} left; nothing was started; make room"
        )
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be made: {error.strerror}; nothing was started"
        ) from error
    keep_names: list[str] = []
    try:
        yield ReplayRuns(folder / "first", folder / "second"), keep_names.append
    finally:
        if not keep_names:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are kept there
                above.rmdir()


def run_once(start: Start, target: Path, *, plain: bool, keep: Say, say: Say) -> None:
    """Run the job to its end in `target`.

    Raises OutlastError for a bad end, with the directory kept; KeyboardInterrupt on request.
    """
    branch(start.run_dir, start.place, target, say)
    plan = msgspec.structs.replace(start.plan, run_dir=str(target), plain=plain)
    with contextlib.chdir(start.planned.cwd):  # scripts name files relative to it
        end, _ = launch(
            plan, lambda path: DetachedDisplay(display(path, plain=plain, lines=sys.stderr))
        )
    if end.outcome == "interrupted":
        raise KeyboardInterrupt
    if end.outcome != "done":
        keep(end.outcome)
        raise OutlastError(
            f"a replay from step {start.place.step} broke, so that nothing can be said of it;"
            f" its logs and events were kept: outlast explain {target}\n"
            + frame_cause(end.outcome, end.cause)
        )


def end_of(run_dir: Path, until_step: int) -> Checkpoint | None:
    """Return the final checkpoint of a replay; None where its script ended before that step.

    Raises StorageError where it could not be written.
    """
    store = Folder(run_dir / "checkpoints")
    for place in checkpoint_places(store):
        if place.step == until_step:
            return open_checkpoint(store, place)
    failed = [event for event in read_events(run_dir) if isinstance(event, CheckpointFailed)]
    if failed:
        raise StorageError(f"a replay could not write its last checkpoint: {failed[-1].error}")
    return None
