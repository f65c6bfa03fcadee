"""Plan from a measured run: ingest, fit, plan and compare, within the predicted bands."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")
pytest.importorskip("polars", reason="rates are fitted: pip install 'outlast[fleet]'")

from outlast.cli.main import main
from outlast.plan.model.scenario import scenario_of
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.run_costs import mean_of, run_costs

SAID = ("--gpus", "8", "--gpus-per-node", "1", "--replica-gpus", "1", "--failures", "6h",
        "--work", "1d", "--step", "4s", "--detect", "9s", "--pause", "31s", "--cost", "12s",
        "--flush", "50s", "--interval", "20min", "--transient", "100%", "--fatal", "0%",
        "--window", "0")  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"


class Loop:
    """Commands of the loop, in this process."""

    def __init__(self, lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.lake, self.rates, self._capsys = lake, lake.with_suffix(".toml"), capsys

    def __call__(self, *arguments: object) -> Any:
        assert main([str(one) for one in arguments]) == 0, self._capsys.readouterr().err
        out = self._capsys.readouterr().out
        return json.loads(out) if "--json" in arguments else out

    def fit(self, run_dir: Path) -> dict[str, Any]:
        """Ingest a run, fit it, and return what the file of rates says."""
        self("fleet", "ingest", self.lake, run_dir)
        self("fleet", "fit", self.lake, "--out", self.rates)
        return tomllib.loads(self.rates.read_text())

    def compare(self, run_dir: Path, *flags: str) -> dict[str, Any]:
        """Lay the run beside its prediction; return the rows by name."""
        arguments = ("--run", run_dir, *flags, "--replications", 64, "--json")
        observed = self("plan", "compare", *arguments)["observed"]
        return {one["observed"]["name"]: one for one in observed["rows"]}


@pytest.fixture
def loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Loop:
    return Loop(tmp_path / "lake", capsys)


def test_measured_rates_of_a_run_predict_it(loop: Loop, tmp_path: Path) -> None:
    """A simulated run that the real controller decided: its costs come back as they were said, its
    failures as many as there were, and what was observed lies in the predicted bands."""
    run_dir = tmp_path / "run"
    told = loop("plan", "story", *SAID, "--strategy", "outlast", "--to", run_dir, "--json")
    failures = int(told["tallies"]["incidents"])
    assert told["outcome"] == "done" and failures > 10
    found = loop.fit(run_dir)
    assert found["failures"]["failures"] == failures
    assert found["failures"]["weight_failures"] == failures
    assert found["measured"]["pause"]["count"] == found["measured"]["detect"]["count"]
    scenario = scenario_of({"gpus": "8", "gpus-per-node": "1", "rates": str(loop.rates)})
    assert scenario.detect_s == pytest.approx(9, rel=0.2)
    assert scenario.pause_s == pytest.approx(31, rel=0.2)
    assert scenario.cost_s == pytest.approx(12, rel=0.05)
    assert scenario.flush_s == pytest.approx(50, rel=0.2)
    assert scenario.step_s == pytest.approx(4, rel=0.05)
    assert scenario.transient > 0.95 and scenario.fatal < 0.05 and scenario.window_s == 0
    for rows in (loop.compare(run_dir, "--rates", str(loop.rates)), loop.compare(run_dir)):
        for name in ("goodput", "save", "redo", "detect", "restart"):
            assert rows[name]["verdict_at_its_rate"] == "within", rows[name]
    rows = loop.compare(run_dir, "--rates", str(loop.rates))
    assert {one["verdict"] for one in rows.values()} == {"within"}


def test_a_run_that_survived_its_failures_does_not_count_as_having_none(
    loop: Loop, tmp_path: Path
) -> None:
    """Its attempt is COMPLETED, as one's that never failed."""
    run_dir = tmp_path / "run"
    told = loop("plan", "story", *SAID, "--seed", 3, "--to", run_dir, "--json")
    found = loop.fit(run_dir)
    assert found["failures"]["failures"] == told["tallies"]["incidents"] > 0
    assert "survived" in found["failures"]["source"]
    assert found["failures"]["per_gpu_second"] == pytest.approx(1 / (6 * 3600), rel=0.5)
    report = loop("fleet", "report", loop.lake, "--json")
    (table,) = [one for one in report["sections"] if one["key"] == "survived"]
    assert sum(row["failures"] for row in table["rows"]) == told["tallies"]["incidents"]
    assert all(row["pause_s"] > 31 for row in table["rows"])  # a recovery's own pause is 31 s
    assert any("that jobs survived: r_f" in note for note in report["notes"])


def test_a_mean_has_an_interval_from_two_durations_on() -> None:
    assert mean_of([3.0]).low_s is None
    found = mean_of([1.0, 2.0, 3.0])
    assert (found.mean_s, found.count) == (2.0, 3)
    assert found.high_s == pytest.approx(2 + 2.92 / 3**0.5)
    assert mean_of([1.0, 2.0] * 50).high_s == pytest.approx(1.5 + 1.6604 * 0.0502519, rel=1e-4)


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_real_run_is_predicted_by_what_it_measured(loop: Loop, tmp_path: Path) -> None:
    """Killed three times, and raised once."""
    pytest.importorskip("torch", reason="a run: pip install 'outlast[run]'")
    import subprocess

    run_dir = tmp_path / "run"
    faults = ["kill:rank=1,step=30", "kill:rank=0,step=60", "raise:rank=1,step=90",
              "kill:rank=1,step=120"]  # fmt: skip
    broken = [word for fault in faults for word in ("--fault", fault)]
    subprocess.run(
        [sys.executable, "-m", "outlast.cli.main", "run", "--nproc-per-node", "2", "--spares", "1",
         "--run-dir", str(run_dir), "--checkpoint-every", "40", *broken, str(EXAMPLE),
         "--steps", "160"],
        check=True, timeout=800,
    )  # fmt: skip
    assert len(run_costs(read_history(run_dir)).survived) == len(faults)
    assert loop.fit(run_dir)["failures"]["failures"] == len(faults)
    rows = loop.compare(run_dir, "--rates", str(loop.rates))
    for name in ("goodput", "detect", "restart"):
        assert rows[name]["verdict_at_its_rate"] == "within", rows[name]
