"""`outlast bench`: predictions beside results, a real race of one strategy, and bad input."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from outlast import events
from outlast.cli.bench.kill_schedule import PlannedKill
from outlast.cli.bench.strategy_runs import (
    BY_POLICY,
    STRATEGIES,
    BenchJob,
    StrategyResult,
    compare_batches,
    judge,
    predict,
    trained_batches,
)
from outlast.cli.main import main
from outlast.plan.answers.policy_trial import MeasuredJob
from outlast.telemetry.event_store import DIRECTORY
from outlast.telemetry.segment_files import SegmentWriter

JOB = BenchJob(world=4, steps=600, every=50, notice_s=5.0)
KILLS = (PlannedKill(at_s=7.0, rank=1), PlannedKill(at_s=31.0, rank=2))
MEASURED = MeasuredJob(
    world=4, spares=1, steps=100, step_s=0.1, interval=50, copy_interval=5, save_s=0.01,
    flush_s=0.2, start_s=6.0, failures=(),
    rungs_s={"replace": (0.6, 0.8), "restart": (5.0, 7.0), "rollback": (4.0,), "migrate": (0.3,)},
)  # fmt: skip
RESULT = StrategyResult(
    strategy="replace-warm", command="", outcome="done", finish_s=61.8, wall_s=70.0, ettr=0.9,
    goodput=0.9, kills={"killed": 2}, rungs={"replace": 2}, step_s=0.1, recovery_s=1.4,
    steps_redone=0, samples_lost=0, samples_repeated=0, cost_usd=0.1,
)  # fmt: skip


def unframed(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def named(name: str) -> int:
    return [one.name for one in STRATEGIES].index(name)


@pytest.mark.parametrize(
    ("name", "rungs"),
    [
        ("restart-from-disk", {"restart": 2}),
        ("restart-from-memory", {"rollback": 2}),
        ("replace-warm", {"replace": 2}),
        ("replace-hot", {"replace": 2}),
        ("move-on-notice", {"migrate": 2}),
        ("elastic", {"shrink": 2, "regrow": 2}),
    ],
)
def test_each_strategy_is_predicted_by_its_own_rungs(name: str, rungs: dict[str, int]) -> None:
    found = predict(MEASURED, STRATEGIES[named(name)], JOB, KILLS, (0.1, 0.1))
    assert found.rungs == rungs
    assert 58 < found.low_s < found.finish_s < found.high_s
    assert found.high_s < 60 * 1.1 + 40


def test_a_result_outside_its_band_has_a_reason() -> None:
    prediction = predict(MEASURED, STRATEGIES[named("replace-warm")], JOB, KILLS, (0.1, 0.1))
    inside = judge(RESULT, prediction, (0.1, 0.1))
    assert (inside.verdict, inside.why) == ("inside", "")
    slow = replace(RESULT, finish_s=90.0, step_s=0.14, rungs={"replace": 1, "respawn": 1})
    above = judge(slow, prediction, (0.1, 0.1))
    assert above.verdict == "above"
    assert "steps took +40%" in above.why and "predicted were 2 replace" in above.why
    ended = judge(replace(RESULT, finish_s=None, reason="no"), prediction, (0.1, 0.1))
    assert (ended.verdict, ended.why) == ("no end", "the job did not end: no")


@pytest.mark.process
@pytest.mark.extended
def test_a_race_of_one_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = _schedule(tmp_path, (3, 2), (3.1, 1))
    folder = tmp_path / "race"
    words = ["bench", "--run-dir", str(folder), "--steps", "60", "--schedule", str(schedule)]
    assert main([*words, "--strategy", "replace-hot", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plain, replaced = report["results"]
    assert (plain["strategy"], replaced["strategy"]) == ("undisturbed", "replace-hot")
    assert replaced["weights"] == "equal" and replaced["loss_difference_max"] == 0
    assert replaced["samples_lost"] == replaced["samples_repeated"] == 0
    assert replaced["kills"]["killed"] >= 1
    assert replaced["rungs"] and set(replaced["rungs"]) <= {"replace", "respawn"}
    assert replaced["predicted"]["low_s"] < replaced["predicted"]["high_s"]
    assert replaced["verdict"] == "inside" or replaced["why"]
    assert json.loads((folder / "report.json").read_bytes()) == report
    assert json.loads((folder / "schedule.json").read_bytes())["kills"][0]["rank"] == 2
    assert (folder / "figure.svg").read_text().startswith("<?xml")
    assert set(report["not_run"]) <= {"torchft"}


def _schedule(folder: Path, *kills: tuple[float, int]) -> Path:
    """Write a schedule of kills, given as time and rank; return its path."""
    path = folder / "mine.json"
    found = [{"at_s": at_s, "rank": rank} for at_s, rank in kills]
    path.write_text(json.dumps({"seed": 0, "every_s": 4, "world": 4, "kills": found}))
    return path


@pytest.mark.process
@pytest.mark.extended
def test_ranks_leave_in_a_race_and_each_sample_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs are ingested, and policies are tried on their failures."""
    pytest.importorskip("polars", reason="lakes are tables: pip install 'outlast[fleet]'")
    schedule = _schedule(tmp_path, (3, 2), (3.2, 0))
    folder = tmp_path / "race"
    words = ["bench", "--run-dir", str(folder), "--steps", "60", "--schedule", str(schedule)]
    assert main([*words, "--strategy", "elastic", "--json"]) == 0
    plain, elastic = json.loads(capsys.readouterr().out)["results"]
    assert plain["weights"] == "equal"
    assert elastic["weights"] == BY_POLICY and elastic["kills"]["killed"] >= 1
    assert elastic["rungs"]["shrink"] >= 1 and elastic["rungs"]["regrow"] >= 1
    assert elastic["samples_lost"] == elastic["samples_repeated"] == elastic["steps_redone"] == 0
    assert elastic["loss_difference_max"] > 0
    assert elastic["predicted"] and (elastic["verdict"] == "inside" or elastic["why"])
    batches = trained_batches(folder / "elastic")
    assert set(batches.values()) == {1} and batches.total() == 60 * 4
    lake = str(tmp_path / "lake")
    assert main(["fleet", "ingest", lake, str(folder / "elastic")]) == 0
    capsys.readouterr()
    tried = ["policy", "try", "--lake", lake, "--json", "--policy", "torchft-like"]
    assert main(tried) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in found["trials"]] == ["torchft-like", "default"]
    assert found["trials"][0]["rungs"]["shrink"] >= 1


@pytest.mark.process
@pytest.mark.extended
def test_torchft_is_raced_where_it_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchft", reason="pip install torchft")
    schedule = _schedule(tmp_path, (3, 2), (20, 1))
    words = ["bench", "--run-dir", str(tmp_path / "race"), "--steps", "60", "--schedule"]
    assert main([*words, str(schedule), "--strategy", "torchft", "--json"]) == 0
    _, torchft = json.loads(capsys.readouterr().out)["results"]
    assert torchft["outcome"] == "done" and torchft["kills"]["killed"] >= 1
    assert torchft["weights"] == BY_POLICY and torchft["predicted"] is None
    assert torchft["samples_lost"] >= 0 and "no prediction" in torchft["why"]


def test_batches_are_compared_by_what_they_hold() -> None:
    expected = Counter({1.0: 1, 2.0: 1, 3.0: 1})
    assert compare_batches(Counter({1.0: 1, 2.0: 2}), expected) == (1, 1)
    assert compare_batches(expected, expected) == (0, 0)


def test_a_batch_of_a_refused_attempt_does_not_count(tmp_path: Path) -> None:
    """Rank 1 leaves inside step 2; its batch is dealt to rank 0 in step 3. Rank 2 dies behind the
    commit of step 2, without an event of its own."""
    writer = SegmentWriter(tmp_path / DIRECTORY, "bench")

    def report(t_ns: int, seat: int, step: int, batch: int) -> events.AnyEvent:
        values = {"loss": 1.0, "batch": float(batch)}
        return events.Metrics(t_ns=t_ns, worker=f"w{seat}", seat=seat, step=step, values=values)

    def done(t_ns: int, seat: int, step: int, generation: int) -> events.AnyEvent:
        return events.PhaseDone(
            t_ns=t_ns, worker=f"w{seat}", seat=seat, generation=generation, n=step, step=step,
            kind="step", t_begin_ns=t_ns - 1, t_vote_ns=t_ns,
        )  # fmt: skip

    def opened(t_ns: int, generation: int) -> events.AnyEvent:
        return events.GenerationOpened(t_ns=t_ns, incident=0, generation=generation, n=0)

    for event in (
        events.RunStarted(t_ns=1, run="r", term=1, world=3, spares=0, script="s", args=()),
        opened(2, 1),
        *(report(3, seat, 1, 10 + seat) for seat in range(3)),
        *(done(4, seat, 1, 1) for seat in range(3)),
        *(report(5, seat, 2, 20 + seat) for seat in range(3)),  # refused: rank 1 has died
        opened(6, 2),
        *(report(7, seat, 2, 20 + seat) for seat in (0, 2)),
        done(8, 0, 2, 2),
        report(9, 0, 3, 21),
        done(10, 0, 3, 2),
    ):
        writer.append(events.encoder.encode(event))
    writer.close()
    assert trained_batches(tmp_path) == Counter([10, 11, 12, 20, 22, 21])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--steps", "10"), "at least 50"),
        (("--checkpoint-every", "0"), "at least 50 and 1"),
        (("--strategy", "replace"), "not one of restart-from-disk"),
        (("--strategy", "shrink"), "move-on-notice, elastic, torchft"),
        (("--every", "0"), "--every 0"),
        (("--every", "soon"), "--every soon"),
        (("--price", "much"), "--price much"),
        (("--schedule", "none.json"), "No such file"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    flags: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--run-dir", str(tmp_path / "new"), *flags]) in (1, 2)
    assert says in unframed(capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_a_folder_with_files_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.touch()
    assert main(["bench", "--run-dir", str(mine)]) == 1
    assert "File exists; nothing was started" in unframed(capsys.readouterr().err)
    assert main(["bench", "--run-dir", str(tmp_path)]) == 1
    assert "is not empty; nothing was started" in unframed(capsys.readouterr().err)
