"""Migration of a rank after a GPU finding of a node check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outlast import events
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome, Runner
from tests.end_to_end.conftest import WORLD, same, wait_for

pytestmark = pytest.mark.process
OWN = """
from pathlib import Path
from outlast.health.check_contract import Check, Probe, Observation as Said, Sample
class Flag(Sample, frozen=True):
    there: bool
def take():
    return Flag(there=Path({flag!r}).exists())
def judge(sample, about):
    if sample.there:
        yield Said("drain", "rows are remapped", device="GPU 1")
    else:
        yield Said("healthy", "all rows are in place")
CHECKS = Check("rows", "gpu-memory", Flag, lambda settings: [Probe("", take)], judge)
"""


@pytest.mark.extended
def test_a_rank_leaves_a_device_before_it_fails(
    runner: Runner, undisturbed: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, hold, settings = tmp_path / "flag", tmp_path / "hold", tmp_path / "check.toml"
    (tmp_path / "rows_check.py").write_text(OWN.format(flag=str(flag)))
    settings.write_text('own = ["rows_check:CHECKS"]\n[profiles]\nperiodic = ["rows"]\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = runner.start(
        "--spares=1", "--check-every=1s", f"--check-settings={settings}", "--migrate-on=drain",
        job=(f"--hold={hold}",),
    )  # fmt: skip
    for rank in range(WORLD):
        wait_for(hold.with_suffix(f".{rank}").exists, f"rank {rank} at step 8")
    flag.touch()

    def found(kind: type[events.Event]) -> list[events.Event]:
        return [event for event in read_events(tmp_path / "run") if isinstance(event, kind)]

    wait_for(lambda: found(events.Warned), "the finding")
    assert not found(events.Decided), "the rank leaves behind its step"
    hold.touch()
    outcome = runner.end(process)
    same(outcome, undisturbed)
    (one,) = outcome.summary["incidents"]
    assert (one["rung"], one["cause"], one["drain"]) == ("migrate", "requested", False)
    assert one["committed_steps_lost"] == 0 and one["state"] == "recovered"
    (decision,) = [event for event in outcome.events if isinstance(event, events.Decided)]
    assert "idle" in {e.state for e in outcome.events if isinstance(e, events.Reported)}
    assert [(seat, new) for seat, _, new in decision.replaced] == [(1, "w1-4")]
    assert "rows: gpu-memory on GPU 1: rows are remapped" in decision.reason
    warned = [event for event in outcome.events if isinstance(event, events.Warned)]
    assert [(event.severity, event.worker) for event in warned] == [("drain", "w1-1")]
    assert "node check: drain: rows: gpu-memory on GPU 1" in outcome.output
    assert "before: drain: rows: gpu-memory on GPU 1" in outcome.explain()
