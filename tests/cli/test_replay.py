"""`outlast replay` on real runs: deterministic, nondeterministic, and refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.cli.replay import _shortened, _until, replay
from outlast.cli.replay_comparison import ReplayReport
from outlast.config import child_environment
from outlast.errors import CorruptionError, RunDirError, UsageError
from outlast.events import LoopBegun
from outlast.telemetry.event_store import DIRECTORY, EventWriter

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("replay_job.py")
STEPS, WRONG_STEP, WRONG_RANK = 12, 6, 1  # as the job has them
EVERY = 4
DEADLINE_S = 120.0


def outlast(
    *words: str, cwd: Path, bug: str = "", code: int | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "outlast", *words],
        cwd=cwd,
        env=child_environment({"REPLAY_BUG": bug}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert code in (None, done.returncode), done.stdout[-3000:] + done.stderr[-6000:]
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done; its script was named relative to where it was started."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / JOB.name).write_bytes(JOB.read_bytes())
    flags = ("--plain", "--nproc-per-node=2", f"--checkpoint-every={EVERY}", "--keep=last=9")
    outlast("run", *flags, f"--run-dir={folder / 'run'}", JOB.name, cwd=folder, code=0)
    return folder / "run"


def unframed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def contents(run_dir: Path) -> set[str]:
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}


@pytest.mark.extended
def test_a_deterministic_run_is_replayed_to_the_bit(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    done = outlast("replay", str(run), "--from=4", "--json", cwd=tmp_path, code=0)
    report = msgspec.json.decode(done.stdout, type=ReplayReport)
    assert report.verdict == "identical"
    assert (report.from_step, report.until_step) == (4, 8), "as far as the run's next checkpoint"
    assert report.replays.numbers == 2 * EVERY
    assert report.replays.states is not None
    assert report.replays.states.compared == 16  # 4 parameters, 3 tensors of AdamW's for each
    assert report.original.sides.equal and report.original.unlike == {}
    assert report.original.sides.numbers == 2 * EVERY
    assert report.original.sides.states is not None, "its own checkpoint of step 8"
    assert contents(run) == before, "nothing stays where nothing differs"


@pytest.mark.extended
def test_a_seed_from_outside_is_named(run: Path, tmp_path: Path) -> None:
    words = ("--from=4", "--steps=3", "--json")
    done = outlast("replay", str(run), *words, cwd=tmp_path, bug="seed", code=1)
    report = msgspec.json.decode(done.stdout, type=ReplayReport)
    assert report.verdict == "different"
    parting, states = report.replays.parting, report.replays.states
    assert parting is not None and states is not None
    assert parting.step == WRONG_STEP
    assert [(number.rank, number.name) for number in parting.numbers] == [(WRONG_RANK, "loss")]
    assert "model.0.weight" in {each.name for each in states.tensors}
    assert all(each.differing for each in states.tensors)
    assert {(odd.rank, odd.path) for odd in states.values} == {(WRONG_RANK, "random.torch")}
    assert "random generators of rank 1 differ" in report.hints[0]
    assert report.hints[-1].endswith("--from 4 --steps 2")
    assert report.original.sides.parting is not None
    shown = unframed(done.stderr)
    assert f"not deterministic: first at step {WRONG_STEP}, rank {WRONG_RANK}: loss" in shown
    for place in map(Path, report.kept):
        assert (place / "events").is_dir() and place.is_relative_to(run / "replay")


def test_unreplayable_runs_are_refused_before_any_process_starts(run: Path, tmp_path: Path) -> None:
    before = contents(run)
    with pytest.raises(UsageError, match=r"no checkpoint of step 5 \(there are 8, 4\)"):
        replay(run, step=5)
    with pytest.raises(UsageError, match="at least one step is needed"):
        replay(run, step=4, steps=0)
    script = run.parent / JOB.name
    text = script.read_text()
    script.write_text(text + "# a comment\n")
    with pytest.raises(UsageError, match=r"was changed later.*--edited"):
        replay(run)
    script.unlink()
    with pytest.raises(UsageError, match="does not exist"):
        replay(run)
    script.write_text(text)
    shard = next(run.glob("checkpoints/step-000000008-*/shard-00001"))
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 0xFF]) + whole[1:])
    with pytest.raises(CorruptionError, match=r"shard-00001: chunk 0 .* nothing was started"):
        replay(run)
    shard.write_bytes(whole)
    assert contents(run) == before
    with pytest.raises(RunDirError, match="command of this run is unknown"):
        replay(tmp_path)


def test_it_goes_no_further_than_the_loop(tmp_path: Path) -> None:
    """After the loop's last step no batch is waited for: nothing could stop there."""
    writer = EventWriter(tmp_path / DIRECTORY, "test")
    writer.emit(LoopBegun(t_ns=1, worker="w", seat=0, until=STEPS, epochs=None, length=None))
    writer.close()
    places = [SavePoint(step, step, "t1g1") for step in (2, 8, 11)]
    for place in places:
        (tmp_path / "checkpoints" / place.directory).mkdir(parents=True)
        (tmp_path / "checkpoints" / place.directory / COMMIT).touch()
    assert _until(tmp_path, places[0], None) == 8, "the run's own checkpoint"
    assert _until(tmp_path, places[0], 4) == 6
    assert _until(tmp_path, places[1], 100) == STEPS - 1
    (note,) = _shortened(places[1], 100, STEPS - 1)
    assert "--steps 100 exceeds" in note and f"ends with step {STEPS}" in note
    assert _shortened(places[1], 3, STEPS - 1) == _shortened(places[1], None, STEPS - 1) == []
    with pytest.raises(UsageError, match=r"nothing to replay.*earlier checkpoints: 2, 8"):
        _until(tmp_path, places[2], None)
