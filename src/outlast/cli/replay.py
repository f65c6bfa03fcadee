"""`outlast replay`: two repetitions of a run's steps, to find non-determinism."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from cyclopts import Parameter

from outlast.checkpoint.format.manifests import SavePoint, digest_of
from outlast.checkpoint.stores.catalog import Checkpoint, checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.folder_store import Folder
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import Printer, byte_progress, print_json
from outlast.cli.replay_comparison import (
    UNKEPT,
    Original,
    ReplayReport,
    RunPair,
    hints,
    judge,
    origin_differences,
    show,
    sides,
)
from outlast.cli.replay_source import compare_failures, failure_of, opened, passed_failure
from outlast.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    CorruptionError,
    OutlastError,
    RunDirError,
    StorageError,
    UsageError,
)
from outlast.events import CheckpointFailed, LoopBegun
from outlast.launch import torchrun_arguments
from outlast.launch.bundles.secret_redaction import REDACTED
from outlast.launch.launcher import launch
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.run_display import DetachedDisplay
from outlast.launch.run_journal import branch
from outlast.launch.terms.run_identity import checkpoints_of
from outlast.launch.torchrun_arguments import PlanFile, RunPlan
from outlast.telemetry.event_store import Losses, life_of, read_events, reported_losses
from outlast.telemetry.live_view import display
from outlast.text_formatting import frame_cause

_FOLDER = "replay"
Note = Callable[[str], None]


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
            original,
            spares=0,
            node=_on_one_host(original.node),
            master_addr="127.0.0.1",
            faults=(),
            checkpoint_every=0,
            snapshot_every=0,
            durable=(),
            until_step=self.until_step,
            master_port=None,
            log_dir=None,
            json=False,
            on_save_failure="stop",
            streams=dict.fromkeys(range(original.world), 0),
        )


def _on_one_host(node: NodeFlags) -> NodeFlags:
    """Return the nodes of a run for one host that has all their ranks."""
    return NodeFlags(nodes=node.nodes, on_one_host=node.nodes > 1)


@contextlib.contextmanager
def room_for(start: Start, size_bytes: int) -> Iterator[tuple[ReplayRuns, Note]]:
    """Yield two run directories below the run's own, and a function that marks them as kept.

    Directories not marked are removed at the end, also after an error. Raises StorageError if two
    checkpoints of `size_bytes` have no room, RunDirError if nothing can be written.
    """
    above = start.run_dir / _FOLDER
    folder = above / f"step-{start.place.step}-{time.strftime('%Y%m%d-%H%M%S')}"
    free_bytes = shutil.disk_usage(start.run_dir).free
    if free_bytes < 2 * size_bytes:
        raise StorageError(
            f"two replays write a checkpoint of {size_bytes} bytes each, and {start.run_dir}"
            f" has {free_bytes} left; nothing was started; free some space"
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


def _refuse_gpus(run_dir: Path, plan: RunPlan, origin: Checkpoint) -> None:
    """Raise UsageError for ranks of several nodes with GPUs: those of one host have the same local
    rank, and so the same GPU."""
    if plan.node.is_several and "gpu" in origin.commit.origin:
        raise UsageError(
            f"{run_dir} is a run of {plan.node.nodes} nodes with GPUs, and a replay runs on one"
            " host; nothing was started; replay it on CPUs, or a run of one node"
        )


def run_once(start: Start, target: Path, *, plain: bool, keep: Note, note: Note) -> None:
    """Run the job to its end in `target`.

    Raises OutlastError for a bad end, with the directory kept; KeyboardInterrupt on request.
    """
    branch(start.run_dir, start.place, target, note)
    plan = msgspec.structs.replace(start.plan, run_dir=str(target), plain=plain)
    with contextlib.chdir(start.planned.cwd):  # scripts name files relative to it
        end, _ = launch(
            plan, lambda path: DetachedDisplay(display(path, plain=plain, lines=sys.stderr))
        )
    if end.outcome == "interrupted":
        raise KeyboardInterrupt
    if end.outcome != "done":
        keep(end.outcome)
        verdict = compare_failures(failure_of(start.run_dir), end.cause)
        raise OutlastError(
            f"the replay from step {start.place.step} failed ({verdict}); its logs and events were"
            f" kept: outlast explain {target}\n" + frame_cause(end.outcome, end.cause)
        )


def end_of(run_dir: Path, until_step: int) -> Checkpoint | None:
    """Return the final checkpoint of a replay; None where its script ended before that step.

    Raises StorageError where it could not be written.
    """
    store = Folder(checkpoints_of(run_dir))
    for place in checkpoint_places(store):
        if place.step == until_step:
            return open_checkpoint(store, place)
    failed = [event for event in read_events(run_dir) if isinstance(event, CheckpointFailed)]
    if failed:
        raise StorageError(f"a replay could not write its last checkpoint: {failed[-1].error}")
    return None


STEPS = 10


def replay(
    run_dir: Path,
    *,
    step: Annotated[int | None, Parameter(name="--from")] = None,
    steps: int | None = None,
    edited: bool = False,
    json: bool = False,
) -> int:
    """Repeat steps of a run twice, and find nondeterministic operations.

    The run may be a forensic bundle, as one that stopped in failure has written.
    Compares all reported numbers and the final checkpoints of both repetitions:
    tensors, optimizer, random generators, data positions. Then compares them with
    the run itself. The script runs again, and so do its own side effects, such as
    writing files. Exit code 0: bit-identical. 1: different.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start, or a bundle of it. Both repetitions
        are written to its subdirectory `replay`, which is kept if they differ.
    step
        Step of the checkpoint to start from (default: the newest).
    steps
        Number of steps (default: 10, or up to the run's next checkpoint if it is nearer).
    edited
        Replay even if the script was changed after the checkpoint was written.
    json
        Print one JSON object on stdout at the end, and all other output on stderr.
    """
    with opened(run_dir) as (source, notes):
        return _replay(source, step, steps, notes, edited=edited, json=json)


def _replay(
    run_dir: Path,
    step: int | None,
    steps: int | None,
    notes: list[str],
    *,
    edited: bool,
    json: bool,
) -> int:
    began = time.monotonic()
    console = Printer(stderr=json)
    plan = torchrun_arguments.read_plan(run_dir)
    origin = open_target(str(run_dir)).open(step)
    notes = notes + _notes(run_dir, plan, origin, edited=edited)
    start = Start(run_dir, origin.place, _until(run_dir, origin.place, steps), plan)
    notes += _shortened(origin.place, steps, start.until_step)
    for note in notes:
        _noting(console)(note)
    with byte_progress("reading the checkpoint") as advance:
        if damages := verify(origin, advance):
            raise CorruptionError(
                f"{damages[0].what}; nothing was started; replay from another checkpoint"
            )
    with room_for(start, origin.size_bytes) as (twins, keep):
        for number, target in enumerate(twins, 1):
            console.rule(f"{number}/2  steps {origin.place.step + 1} to {start.until_step}")
            run_once(start, target, plain=json, keep=keep, note=_noting(console))
        if passed := passed_failure(run_dir, start.place.step, start.until_step):
            notes.append(passed)
            _noting(console)(passed)
        pair, original, suggestions = _held_together(start, twins, origin)
        verdict = judge(pair, original)
        directories = tuple(map(str, twins)) if verdict != "identical" else ()
        if directories:
            keep(verdict)
    report = ReplayReport(
        verdict=verdict,
        run_dir=str(run_dir),
        from_step=start.place.step,
        until_step=start.until_step,
        replays=pair,
        original=original,
        hints={"different": suggestions, "unlike the run": [UNKEPT]}.get(verdict, []),
        notes=notes,
        kept=directories,
        wall_s=time.monotonic() - began,
    )
    show(report, console)
    if json:
        print_json(report)
    return EXIT_DONE if verdict == "identical" else EXIT_USER_ERROR


def _until(run_dir: Path, place: SavePoint, steps: int | None) -> int:
    """Return the step to stop at.

    The loop's last step is excluded: no batch is requested after it. Raises UsageError where there
    is no step to replay.
    """
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps}: at least one step is needed")
    step = place.step
    saved_steps = {
        checkpoint_place.step
        for checkpoint_place in checkpoint_places(Folder(checkpoints_of(run_dir)))
    }
    later = [saved_step for saved_step in saved_steps if step < saved_step <= step + STEPS]
    target = step + steps if steps else min(later, default=step + STEPS)
    loops = [event.steps for event in read_events(run_dir) if isinstance(event, LoopBegun)]
    ends = next((end for end in reversed(loops) if end is not None), None)
    if ends is None or target < ends:
        return target
    if ends - 1 <= step:
        earlier = (
            ", ".join(
                map(str, sorted(saved_step for saved_step in saved_steps if saved_step < ends - 1))
            )
            or "none"
        )
        raise UsageError(
            f"the run's loop ends with step {ends}, and a replay stops before the last one: from"
            f" step {step} there is nothing to replay; nothing was started; earlier checkpoints:"
            f" {earlier}"
        )
    return ends - 1


def _shortened(place: SavePoint, steps: int | None, until_step: int) -> list[str]:
    if steps is None or place.step + steps <= until_step:
        return []
    return [
        f"--steps {steps} exceeds the run's loop, which ends with step {until_step + 1}: the"
        f" replay stops before its last step, after {until_step - place.step} steps"
    ]


def _notes(
    run_dir: Path, plan: torchrun_arguments.PlanFile, origin: Checkpoint, *, edited: bool
) -> list[str]:
    """Return notes on the conditions of the replay. Raises UsageError where they differ from the
    run's."""
    _refuse_gpus(run_dir, plan.plan, origin)
    if not Path(plan.cwd).is_dir():
        raise UsageError(
            f"the run was started in {plan.cwd}, which no longer exists; nothing was"
            " started; the script's relative paths need it"
        )
    notes: list[str] = []
    there, script = origin.commit.origin, plan.plan.script
    if not script.startswith("-m ") and not Path(script).is_file():
        raise UsageError(f"the script {script} does not exist; nothing was started; restore it")
    digest = there.get("script_digest", "")
    path = Path(there.get("script", "") or script)
    path = path if path.is_file() else Path(script)  # a bundle's, elsewhere
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    same = bool(content) and digest_of(content) == digest
    if not digest:
        notes.append(f"the checkpoint does not record whether {script} was changed")
    elif not same and not edited and REDACTED.encode() in content:
        raise UsageError(
            f"{path}: the bundle has left secrets out of this script; nothing was started; restore"
            f" the script at {Path(plan.cwd, there.get('script', ''))}, or pass --edited to replay"
            " it without them"
        )
    elif not same and not edited:
        raise UsageError(
            f"{path} is not the script that wrote {origin.place.directory}: it was changed"
            " later; nothing was started; restore it, or pass --edited to replay the changed"
            " one"
        )
    elif not same:
        notes.append(f"{path} was changed later: the run itself used another version")
    if life_of(run_dir, read_events(run_dir)) == "running":
        notes.append("the run is still running, on the same machine as its replays")
    return notes


def _noting(console: Printer) -> Callable[[str], None]:
    return lambda text: console.print(f"note: {text}", style="yellow", soft_wrap=True)


def _held_together(
    start: Start, twins: ReplayRuns, origin: Checkpoint
) -> tuple[RunPair, Original, list[str]]:
    """Compare the replays, and the run with the first; add hints."""
    ends = [end_of(twin, start.until_step) for twin in twins]
    a, b = (_between(reported_losses(twin), start) for twin in twins)
    with byte_progress("comparing") as advance:
        pair = sides(a, b, ends[0], ends[1], advance)
    here, again = (end.commit.origin if end else {} for end in ends)
    suggestions = hints(pair, (here, again))
    if pair.parting and pair.parting.step < start.until_step:
        steps = pair.parting.step - start.place.step
        shorter = f"outlast replay {start.run_dir} --from {start.place.step} --steps {steps}"
        suggestions.append(f"which tensors differ first: {shorter}")
    return pair, _original(start, a, origin, ends[0]), suggestions


def _original(start: Start, a: Losses, origin: Checkpoint, first: Checkpoint | None) -> Original:
    """Compare the run itself with a replay, on the numbers that both reported.

    A rank that died may have lost numbers.
    """
    numbers = _between(reported_losses(start.run_dir), start)
    both = a.keys() & numbers.keys()
    store = Folder(checkpoints_of(start.run_dir))
    later = [place for place in checkpoint_places(store) if place.step == start.until_step]
    then = open_checkpoint(store, later[0]) if later else None
    pair = sides({key: a[key] for key in both}, {key: numbers[key] for key in both}, first, then)
    here = first.commit.origin if first else {}
    return Original(
        sides=pair, unlike=origin_differences(origin.commit.origin, here) if first else {}
    )


def _between(numbers: Losses, start: Start) -> Losses:
    return {
        key: value
        for key, value in numbers.items()
        if start.place.step < key[1] <= start.until_step
    }
