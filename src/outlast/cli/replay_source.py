"""Source of a replay: a run directory, or a bundle that is unpacked for it."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outlast.atomic_files import replace_file
from outlast.controller.recovery.root_fault import is_accident
from outlast.errors import UsageError
from outlast.events import Fault, RunEnded
from outlast.launch.bundles.bundle_format import SCRIPT, BundleManifest
from outlast.launch.bundles.bundle_reader import unpack
from outlast.launch.bundles.secret_redaction import REDACTED
from outlast.launch.terms.run_identity import RunningJob
from outlast.launch.torchrun_arguments import PlanFile, read_plan
from outlast.telemetry.event_store import read_events
from outlast.text_formatting import error_name


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield a run directory, and notes on it. That of a bundle is removed at the end, unless the
    replay has kept something in it.

    Raises as `unpack`, and UsageError for a bundle without a checkpoint, or whose checkpoint lies
    where this host cannot read it.
    """
    if not path.is_file():
        yield path.absolute(), []
        return
    folder = Path(tempfile.mkdtemp(prefix="outlast-bundle-"))
    run_dir = folder / "run"
    try:
        yield run_dir, _notes(unpack(path, run_dir), path, run_dir)
    finally:
        if not (run_dir / "replay").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _notes(manifest: BundleManifest, path: Path, run_dir: Path) -> list[str]:
    place = manifest.checkpoint
    if place is None:
        raise UsageError(
            f"{path}: the run had no checkpoint, so that there is nothing to replay from; its logs,"
            " events and explanation.txt are in the bundle (tar xf)"
        )
    if not (place.is_inside or Path(place.path).is_dir()):
        raise UsageError(
            f"{path}: its checkpoint of step {place.step} ({place.size_bytes} bytes) is too large"
            f" for a bundle, and {place.path} is not here; replay it where that can be read"
        )
    plan = read_plan(run_dir)
    outcome = manifest.outcome or "not yet"
    end = f"its end at step {manifest.step}: {outcome}"
    notes = [f"bundle of run {manifest.run} on {manifest.host}; {end}"]
    if REDACTED in plan.plan.args:
        notes.append("an argument of the script is a secret, which the bundle does not have")
    moved = _moved(plan, run_dir)
    if moved != plan:
        notes.append(f"the script is the bundle's {SCRIPT}, and this Python runs it")
        job = msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunningJob)
        job = msgspec.structs.replace(job, script=moved.plan.script)
        replace_file(run_dir / "run.json", msgspec.json.encode(job))
        replace_file(run_dir / "plan.json", msgspec.json.encode(moved))
    return notes


def _moved(plan: PlanFile, run_dir: Path) -> PlanFile:
    """Return the plan with the bundle's script and this interpreter, where those of the run are not
    here."""
    one, script = plan.plan, run_dir / SCRIPT
    if one.script.startswith("-m ") or Path(one.script).is_file() or not script.is_file():
        return plan
    there = Path(plan.cwd, one.script)
    words = [str(script) if Path(plan.cwd, word) == there else word for word in one.command]
    if not shutil.which(words[0]):
        words[0] = sys.executable
    cwd = plan.cwd if Path(plan.cwd).is_dir() else str(run_dir)
    moved = msgspec.structs.replace(one, script=str(script), command=tuple(words))
    return msgspec.structs.replace(plan, plan=moved, cwd=cwd)


def failure_of(run_dir: Path) -> Fault | None:
    """Return the cause of a run's end in failure; None if it did not end so."""
    ends = [one for one in read_events(run_dir) if isinstance(one, RunEnded)]
    failed = bool(ends) and ends[-1].outcome in ("user_error", "gave_up")
    return ends[-1].cause if failed else None


def passed_failure(run_dir: Path, step: int, until_step: int) -> str:
    """Return a note if a replay that ended well has passed the step of the run's failure."""
    failure = failure_of(run_dir)
    if failure is None or not step < failure.step <= until_step:
        return ""
    return (
        f"the run's failure at step {failure.step} ({failure.kind}) did not repeat: its cause is"
        " outside of what the checkpoint, the script and its arguments hold"
    )


def compare_failures(before: Fault | None, now: Fault | None) -> str:
    """Return whether a replay failed as the run did: text for its error."""
    if before is None or now is None:
        return "the run itself did not fail there"
    same = (before.kind, before.step, error_name(before)) == (now.kind, now.step, error_name(now))
    if same and not is_accident(now):
        return f"the run's failure repeats at step {now.step}: its cause is in the job"
    return f"the run failed otherwise, at step {before.step}: {before.kind}: {before.detail[:200]}"
