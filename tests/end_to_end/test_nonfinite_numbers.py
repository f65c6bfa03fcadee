"""Gradients that are not finite: cured in place, on another device, skipped, or a named end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Outcome, Runner

from outlast import events
from outlast.checkpoint.format import codec

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("jobs") / "nonfinite_job.py"
PAIR = "--nproc-per-node=2"


@pytest.fixture
def pair(runner: Runner) -> Runner:
    """Return a runner of two ranks."""
    runner.world = 2
    return runner


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of the undisturbed run, which has no finding."""
    outcome = Runner(tmp_path_factory.mktemp("clean"), world=2).run(script=JOB)
    assert outcome.code == 0, outcome.output
    assert not of_kind(outcome, events.Warned)
    return outcome.ranks


def of_kind(outcome: Outcome, kind: Any) -> list[Any]:
    return [event for event in outcome.events if isinstance(event, kind)]


def findings(outcome: Outcome) -> list[tuple[str, str]]:
    """Return severity and worker of each finding of the sentinel."""
    found = of_kind(outcome, events.Warned)
    assert all(event.check == "nonfinite" for event in found)
    return [(event.severity, event.worker) for event in found]


def rungs(outcome: Outcome) -> list[str]:
    return [event.rung for event in of_kind(outcome, events.Decided)]


def test_a_transient_error_is_cured_in_place_with_the_same_bits(
    pair: Runner, clean: list[dict[str, Any]]
) -> None:
    outcome = pair.run("--fault=nan:rank=1,step=5", script=JOB)
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == clean
    assert findings(outcome) == [("warn", "w1-1")]
    assert outcome.summary["incidents"] == []
    (one,) = of_kind(outcome, events.Warned)
    assert "step 5: the gradient of model.module.0.weight" in one.detail
    assert "rank 1 brought it" in one.detail and "it is finite: a transient error" in one.detail
    assert "sentinel: nonfinite: gradient not finite on cpu" in outcome.output


def test_a_bad_device_is_left_behind_with_the_same_bits(
    pair: Runner, clean: list[dict[str, Any]]
) -> None:
    """The process that computes NaN from step 5 on gives its rank to a spare, once."""
    outcome = pair.run("--spares=1", "--fault=nan:rank=1,step=5,cause=device", script=JOB)
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == clean
    assert findings(outcome) == [("drain", "w1-1")]
    assert rungs(outcome) == ["migrate"]
    (one,) = outcome.summary["incidents"]
    assert (one["cause"], one["committed_steps_lost"]) == ("nonfinite", 0)
    (drain,) = of_kind(outcome, events.Warned)
    assert "rank 1 is finite elsewhere: that device is at fault" in drain.detail


def test_bad_data_stops_with_its_sample_once_a_device_is_ruled_out(pair: Runner) -> None:
    outcome = pair.run("--spares=1", script=JOB, job=("--bad=19",))
    assert outcome.code == 1, outcome.output
    assert rungs(outcome) == ["migrate", "stop"]
    framed = " ".join(outcome.output.partition("-" * 40)[2].split())
    assert "user error: nonfinite: step 3:" in framed
    assert "on cpu of" in framed and "(w1-1)" in framed and "(w1-2)" in framed
    assert "the data or the model, not a device" in framed
    assert "sample 1 of 4 (from 0) gives it alone" in framed
    batch = codec.decode((outcome.run_dir / "nonfinite/step-000003-rank-1.batch").read_bytes())
    assert (batch["step"], batch["rank"]) == (3, 1)
    assert batch["batch"][0].tolist() == [17, 19, 21, 23]
    assert batch["batch"][1].isnan().any(dim=1).tolist() == [False, True, False, False]


def test_bad_batches_are_skipped_on_all_ranks_and_counted(pair: Runner) -> None:
    """Samples 3 and 11 of rank 1 are of the first two steps: two in a row are allowed."""
    outcome = pair.run("--nan=skip:2", script=JOB, job=("--bad=3,11,19,45",))
    assert outcome.code == 1, "a third batch in a row ends the run"
    assert "2 batches in a row were skipped before it" in outcome.output
    skipped = of_kind(outcome, events.BatchSkipped)
    assert [(one.step, one.row, one.seat) for one in skipped] == [(1, 1, 1), (2, 2, 1)]


@pytest.mark.extended
def test_a_skipped_step_changes_no_weight(pair: Runner) -> None:
    outcome = pair.run("--nan=skip:1", script=JOB, job=("--bad=3,19", "--steps=4"))
    assert outcome.code == 0, outcome.output
    assert "batches skipped: 2, of steps 1, 3" in outcome.output
    losses = outcome.ranks[1]["losses"]
    assert [one == "nan" for one in losses] == [True, False, True, False]
    assert outcome.ranks[0]["weights"] == outcome.ranks[1]["weights"]
    before, after = outcome.ranks[0]["norms"][1:3]
    assert before == after, "the optimizer stepped with a skipped batch"


@pytest.mark.extended
def test_a_scaler_and_a_careful_optimizer_handle_it_by_themselves(pair: Runner) -> None:
    scaled = pair.run(script=JOB, job=("--scaler",))
    assert scaled.code == 0 and not findings(scaled), scaled.output
    assert scaled.ranks[0]["skips"] >= 1
    own = pair.end(pair.start(script=JOB, job=("--own-step", "--bad=19"), name="own"), "own")
    assert own.code == 0, own.output
    noted = " ".join(own.output.replace("│", " ").split())
    assert "the optimizer has a step of its own" in noted


@pytest.mark.extended
def test_stop_and_off(pair: Runner) -> None:
    stopped = pair.run("--nan=stop", script=JOB, job=("--bad=19",))
    assert stopped.code == 1 and rungs(stopped) == ["stop"]
    assert "nothing was tried (--nan stop)" in " ".join(stopped.output.split())
    off = pair.end(pair.start("--nan=off", script=JOB, job=("--bad=19",), name="off"), "off")
    assert off.code == 0 and not findings(off)


def test_weights_that_a_phase_with_undo_leaves_are_looked_at(pair: Runner) -> None:
    """The second of two steps in a phase would apply it; all of the phase is undone."""
    clean = pair.end(pair.start(script=JOB, job=("--undo",), name="undo"), "undo")
    assert clean.code == 0 and not findings(clean), clean.output
    cured = pair.run("--fault=nan:rank=1,step=5", script=JOB, job=("--undo",))
    assert cured.code == 0, cured.output
    assert cured.ranks == clean.ranks
    assert findings(cured) == [("warn", "w1-1")]
    (one,) = of_kind(cured, events.Warned)
    assert "step 5: the parameter model.module.0.weight" in one.detail


@pytest.mark.extended
def test_a_phase_with_undo_is_skipped_as_a_whole(pair: Runner) -> None:
    outcome = pair.run("--nan=skip:1", script=JOB, job=("--undo", "--bad=3,19", "--steps=4"))
    assert outcome.code == 0, outcome.output
    assert "batches skipped: 2, of steps 1, 3" in outcome.output
    assert outcome.ranks[0]["weights"] == outcome.ranks[1]["weights"]
    first, second, third, last = outcome.ranks[0]["norms"]
    assert second == third and len({first, second, last}) == 3


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["", ",cause=device", ",phase=forward"])
def test_frozen_layers_and_a_loss_that_is_reported_in_the_phase(pair: Runner, fault: str) -> None:
    job = ("--frozen", "--inside")
    clean = pair.end(pair.start(script=JOB, job=job, name="clean"), "clean")
    assert clean.code == 0, clean.output
    outcome = pair.run("--spares=1", f"--fault=nan:rank=1,step=5{fault}", script=JOB, job=job)
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == clean.ranks
    assert [severity for severity, _ in findings(outcome)] == [
        "drain" if "device" in fault else "warn"
    ]


@pytest.mark.extended
def test_one_number_in_the_share_of_one_replica_is_found_by_all(
    pair: Runner, clean: list[dict[str, Any]]
) -> None:
    outcome = pair.run(script=JOB, job=("--spot",))
    assert outcome.code == 0, outcome.output
    assert outcome.ranks == clean
    (one,) = of_kind(outcome, events.Warned)
    assert "module.3.bias (1 of 4 elements) is not finite on every rank" in one.detail


@pytest.mark.extended
def test_a_script_that_raises_by_itself_moves_away_from_a_bad_device(pair: Runner) -> None:
    clean = pair.run(script=JOB, job=("--strict",))
    flags = ("--spares=1", "--fault=nan:rank=1,step=5,cause=device")
    moved = pair.end(pair.start(*flags, script=JOB, job=("--strict",), name="moved"), "moved")
    assert moved.code == 0 and moved.ranks == clean.ranks, moved.output
    assert findings(moved) == [("drain", "w1-1")]
    assert rungs(moved) == ["retry", "retry", "migrate"]
    bad = pair.end(pair.start(script=JOB, job=("--strict", "--bad=19"), name="bad"), "bad")
    text = " ".join(bad.output.split())
    assert bad.code == 1 and "user error: nonfinite: RuntimeError: The total norm" in text
    assert "before, rank 1" in text and "step-000003-rank-" in text


@pytest.mark.extended
def test_a_script_that_exits_for_one_bad_loss_is_replaced(pair: Runner) -> None:
    """A script that ends by `sys.exit(1)` inside a phase, as many do, and others that go on."""
    clean = pair.run(script=JOB, job=("--quit",))
    flags = ("--spares=1", "--fault=nan:rank=1,step=5,phase=forward")
    once = pair.end(pair.start(*flags, script=JOB, job=("--quit",), name="once"), "once")
    assert once.code == 0 and once.ranks == clean.ranks, once.output
    assert rungs(once) == ["replace"]
    (incident,) = once.summary["incidents"]
    assert incident["cause"] == "exited"
