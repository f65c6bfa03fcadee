"""Bundles of real runs that stopped, and their replays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.config import child_environment
from outlast.errors import RunDirError, UsageError
from outlast.launch.bundles import bundle_writer
from outlast.launch.bundles.bundle_format import FOLDER
from outlast.launch.bundles.bundle_reader import unpack
from outlast.launch.bundles.bundle_writer import KEPT, write_bundle
from outlast.telemetry.event_store import read_events
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("replay_job.py")
SECRET = "0123456789abcdef0123456789"
FAILS_AT = 6  # as the job has it


def outlast(*words: str, cwd: Path, bug: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *words],
        cwd=cwd,
        env=child_environment({"REPLAY_BUG": bug, "WANDB_API_KEY": SECRET}),
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    text = done.stdout + done.stderr
    return done.returncode, " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose script raised in step 6, behind a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / JOB.name).write_bytes(JOB.read_bytes())
    flags = ("--plain", "--nproc-per-node=2", "--checkpoint-every=4")
    words = (*flags, f"--run-dir={folder / 'run'}", JOB.name, "--token", "abcdefgh")
    code, text = outlast("run", *words, cwd=folder, bug="raise")
    assert code == 1 and f"what is needed to find the cause: {folder}/run/bundles/1" in text
    return folder / "run"


def test_a_stop_leaves_a_bundle_without_secrets(stopped: Path, tmp_path: Path) -> None:
    manifest = unpack(stopped / FOLDER / "1.tar.zst", tmp_path / "into")
    assert (manifest.outcome, manifest.step) == ("user_error", FAILS_AT - 1)
    assert manifest.cause is not None and manifest.cause.kind == "raised"
    assert manifest.checkpoint is not None and manifest.checkpoint.is_inside
    assert manifest.checkpoint.step == 4 and "torch" in manifest.versions
    assert manifest.redacted >= 3 and manifest.omitted == []
    files = {name: (tmp_path / "into" / name).read_bytes() for name in manifest.files}
    assert all(len(files[name]) == size for name, size in manifest.files.items())
    for name in ("explanation.txt", "script.py", "plan.json", "run.json", "summary.json"):
        assert files[name], name
    assert "bad record, read with [redacted]" in manifest.cause.traceback
    assert b"bad record, read with [redacted]" in files["explanation.txt"]
    assert [name for name in files if name.startswith("logs/1/") and "stderr" in name]
    everything = b"".join(files.values())
    assert SECRET.encode() not in everything and b"abcdefgh" not in everything
    before, after = (incidents(read_history(path)) for path in (stopped, tmp_path / "into"))
    assert [one.number for one in before] == [one.number for one in after]
    assert len(read_events(stopped)) == len(read_events(tmp_path / "into"))


def test_a_bundle_repeats_a_failure_of_the_script(stopped: Path, tmp_path: Path) -> None:
    bundle = str(stopped / FOLDER / "1.tar.zst")
    code, text = outlast("replay", bundle, cwd=tmp_path, bug="raise")
    assert code == 1 and f"the run's failure repeats at step {FAILS_AT}" in text
    assert "an argument of the script is a secret" in text


@pytest.mark.extended
def test_a_failure_that_does_not_repeat_is_named(stopped: Path, tmp_path: Path) -> None:
    """Elsewhere, without the script that was started: the bundle has it."""
    bundle = tmp_path / "b.tar.zst"
    bundle.write_bytes((stopped / FOLDER / "1.tar.zst").read_bytes())
    (stopped.parent / JOB.name).rename(tmp_path / "away.py")
    try:
        code, text = outlast("replay", str(bundle), cwd=tmp_path, bug="")
    finally:
        (tmp_path / "away.py").rename(stopped.parent / JOB.name)
    assert code == 0 and "bit-identical" in text, text
    assert f"the run's failure at step {FAILS_AT} (raised) did not repeat" in text
    assert "the script is the bundle's script.py" in text


def test_the_command_writes_one_of_any_run(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.tar.zst"
    assert main(["bundle", str(stopped), "--out", str(out)]) == 0
    assert unpack(out, tmp_path / "mine").outcome == "user_error"
    with pytest.raises(UsageError, match="exists; nothing was written"):
        bundle_command(stopped, out)
    with pytest.raises(UsageError, match=r"a bundle's name ends in \.tar\.zst"):
        bundle_command(stopped, tmp_path / "mine.zip")
    with pytest.raises(RunDirError, match="is no run directory"):
        write_bundle(tmp_path)
    monkeypatch.setattr(bundle_writer, "CHECKPOINT_MAX", 10)
    monkeypatch.setattr(bundle_writer, "TAIL_BYTES", 10)
    small = unpack(write_bundle(stopped, target=tmp_path / "s.tar.zst"), tmp_path / "small")
    assert small.checkpoint is not None and not small.checkpoint.is_inside
    assert any("before its tail" in one for one in small.omitted)
    late = unpack(
        write_bundle(stopped, target=tmp_path / "l.tar.zst", deadline_s=-1.0), tmp_path / "late"
    )
    assert any("took too long" in one for one in late.omitted)
    assert not list(tmp_path.glob(".bundle-*"))


def bundle_command(run_dir: Path, out: Path) -> None:
    from outlast.cli.bundle import bundle

    bundle(run_dir, out=out)


def test_a_disk_without_room_is_named_and_old_bundles_are_removed(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100, 100 + KEPT):
        (stopped / FOLDER / f"{number}.tar.zst").touch()
    (stopped / FOLDER / "mine.tar.zst").touch()
    write_bundle(stopped)
    kept = {path.name for path in (stopped / FOLDER).iterdir()}
    assert kept == {"mine.tar.zst", *(f"{number}.tar.zst" for number in range(100, 100 + KEPT))}
    for path in (stopped / FOLDER).iterdir():
        path.unlink()
    write_bundle(stopped)  # the other tests read it
    monkeypatch.setattr(bundle_writer, "BYTES_MAX", 1 << 60)
    with pytest.raises(RunDirError, match="no bundle was written: less than"):
        write_bundle(stopped, target=tmp_path / "b.tar.zst")
    assert not list(tmp_path.iterdir())
