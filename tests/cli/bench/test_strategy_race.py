"""`outlast bench`: predictions beside results, a real race of one strategy, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from outlast.cli.bench.kill_schedule import PlannedKill
from outlast.cli.bench.strategy_runs import (
    STRATEGIES,
    BenchJob,
    StrategyResult,
    judge,
    predict,
)
from outlast.cli.main import main
from outlast.plan.answers.policy_trial import MeasuredJob

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
    schedule = tmp_path / "mine.json"
    schedule.write_text(
        '{"seed":0,"every_s":4,"world":4,"kills":[{"at_s":3,"rank":2},{"at_s":3.1,"rank":1}]}'
    )
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
