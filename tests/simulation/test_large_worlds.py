"""Worlds of many ranks: the real controller, each rank on a simulated host of its own."""

from __future__ import annotations

import msgspec
import pytest

from outlast import events
from outlast.config import Limits
from outlast.controller.inputs import Action, Send
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.plan.simulate.controller_peers import ControllerPeers

pytestmark = pytest.mark.sim
SPARES = 2
KILLED = events.Fault(kind="killed", detail="SIGKILL", signal=9)


class LargeRun(ControllerPeers):
    """A run that loses ranks one at a time. `sizes_bytes`: messages of the newest incident."""

    def __init__(self, world: int) -> None:
        limits = Limits(respawns_max=1_000_000)
        super().__init__("r", world, SPARES, limits, SavePolicy(), lambda _: None)
        self.world = world
        self.sizes_bytes: list[int] = []
        self.now_ns = 1_000_000_000
        self.begin()

    def _execute(self, action: Action) -> None:
        if isinstance(action, Send):
            self.sizes_bytes.append(len(msgspec.msgpack.encode(action.body)))
        super()._execute(action)

    def lose(self, number: int) -> str:
        """Lose a rank after one more phase; return the worker that takes its seat."""
        self.sizes_bytes.clear()
        self.n, self.step = self.n + 1, self.step + 1
        self.now_ns += 10_000_000_000
        seat = (7919 * number + 3) % self.world
        self.lose_seat(seat, KILLED, live=True)
        self.exchange_messages()
        self.report_ready()
        assert self.state.mode == "open" and self.decisions == number + 1
        assert self.decided is not None and self.decided.rung in ("replace", "respawn")
        assert [each[0] for each in self.decided.replaced] == [seat]
        return self.state.members.seats[seat]


@pytest.mark.parametrize(
    ("world", "incidents"),
    [(2_000, 3), pytest.param(100_000, 100, marks=[pytest.mark.long, pytest.mark.timeout(7200)])],
)
def test_a_large_run_outlasts_its_incidents(world: int, incidents: int) -> None:
    run = LargeRun(world)
    seated = [run.lose(number) for number in range(incidents)]
    assert len(set(seated)) == incidents
    run.state.validate()
    assert run.state.generation == incidents + 1 and run.state.progress.n == incidents


def test_no_message_of_an_incident_grows_with_the_world() -> None:
    small, large = LargeRun(100), LargeRun(1_600)
    for run in (small, large):
        run.lose(0)
    grown = 8  # digits of ranks and names
    assert max(large.sizes_bytes) <= max(small.sizes_bytes) + grown
    for run in (small, large):  # Close, Decide or Seat, Connect, Open
        assert len(run.sizes_bytes) == 4 * run.world - 1
