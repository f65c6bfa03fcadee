"""Save intervals during a run: chosen once all costs are measured, sent to rank 0."""

from __future__ import annotations

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.config import AUTO
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.transport import messages

BOTH = SavePolicy(memory=AUTO, disk=AUTO)


def running(policy: SavePolicy = BOTH) -> ControllerDriver:
    return ControllerDriver(world=2, spares=0, policy=policy, lease_s=1e6).begin().open()


def copied(desk: ControllerDriver, n: int, blocking_s: float = 0.001, step_s: float = 1.0) -> None:
    """A copy in memory."""
    desk.say(
        desk.seats()[0],
        messages.Checkpointed(
            n=n, step=n, path="", tier="memory", blocking_s=blocking_s, step_s=step_s
        ),
    )


def flushed(
    desk: ControllerDriver,
    n: int,
    blocking_s: float = 0.001,
    flush_s: float = 5.0,
    drag_s: float = 0.5,
) -> None:
    """A checkpoint is on the disk."""
    desk.say(
        desk.seats()[0],
        messages.Checkpointed(
            n=n,
            step=n,
            path="ck",
            blocking_s=blocking_s,
            flush_s=flush_s,
            drag_s=drag_s,
            step_s=1.0,
        ),
    )


def told(desk: ControllerDriver) -> list[tuple[str, int, int]]:
    sent = desk.sent(messages.SaveEvery, history=True)
    return [(worker, body.memory, body.disk) for worker, body in sent]


def test_nothing_is_chosen_before_both_tiers_were_measured() -> None:
    desk = running()
    copied(desk, 4, blocking_s=0.0)  # the first one, which prepared as well
    flushed(desk, 4, blocking_s=0.0)
    assert told(desk) == [] and not desk.emitted(events.Scheduled, history=True)
    copied(desk, 8)
    assert told(desk) == []
    flushed(desk, 8)
    ((worker, memory, disk),) = told(desk)
    assert (worker, memory) == ("w1-0", 1)  # a copy takes a thousandth of a step
    assert disk > 10
    (said,) = desk.emitted(events.Scheduled, history=True)
    assert (said.memory, said.disk) == (memory, disk)
    assert "C = 1 ms a save" in said.why and "F = 5 s to flush" in said.why


def test_what_was_asked_for_stays() -> None:
    desk = running(SavePolicy(memory=AUTO, disk=7))
    copied(desk, 4, blocking_s=0.5)
    ((_, memory, disk),) = told(desk)
    assert disk == 7 and 1 <= memory <= 7
    (said,) = desk.emitted(events.Scheduled, history=True)
    assert "fixed by --checkpoint-every 7" in said.why
    desk = running(SavePolicy(memory=3, disk=7))
    copied(desk, 3)
    flushed(desk, 7)
    assert told(desk) == []


def test_one_tier_alone_pays_for_its_own_copy() -> None:
    desk = running(SavePolicy(disk=AUTO))
    flushed(desk, 4, blocking_s=0.0)
    assert told(desk) == []
    flushed(desk, 8, blocking_s=2.0)
    ((_, memory, disk),) = told(desk)
    assert memory == 0 and disk > 10
    (said,) = desk.emitted(events.Scheduled, history=True)
    assert "blocks 2 s" in said.why


def test_who_takes_seat_0_is_told_again() -> None:
    desk = running()
    copied(desk, 4)
    flushed(desk, 4)
    ((_, memory, disk),) = told(desk)
    desk.lose("w1-0", 4, slots={"before:4": b""})
    desk.status("w1-1", 4, "idle")
    desk.hello("w1-2")
    desk.heal(4)
    assert told(desk)[1:] == [("w1-2", memory, disk)]


def test_frames_that_an_agent_may_have_missed_are_said_again() -> None:
    desk = running()
    copied(desk, 4)
    flushed(desk, 4)
    known = told(desk)
    desk.history.clear()
    desk.agent("w1-0", "w1-1")
    assert told(desk) == known


def test_failures_shorten_the_interval_and_their_tier_is_counted() -> None:
    desk = running()
    copied(desk, 4)
    flushed(desk, 4)
    ((_, _, before),) = told(desk)
    for life in range(4):
        desk.now_ns += 60 * 10**9
        flushed(desk, 8 + life)
        for name in desk.seats():
            desk.lose(name, 9 + life)
        desk.open(8 + life)
    seen = desk.state.intervals.measured
    assert (seen.failures, seen.from_disk, seen.from_memory) == (4, 4, 0)
    assert len(seen.disk.restore.values) == 4 and seen.restoring_ns == 0
    newest = desk.emitted(events.Scheduled, history=True)[-1]
    assert newest.disk < before and "seen in" in newest.why


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_failure_counts_where_it_was_restored_from(tier: str) -> None:
    desk = running()
    desk.say("w1-0", messages.Checkpointed(n=4, step=4, path="", tier=tier))
    for name in desk.seats():
        desk.lose(name, 5)
    desk.open(4)
    seen = desk.state.intervals.measured
    assert (seen.from_memory, seen.from_disk) == (tier == "memory", tier == "disk")


def test_noise_between_two_decisions_moves_nothing() -> None:
    desk = running()
    copied(desk, 4)
    flushed(desk, 4)
    first = desk.state.intervals.schedule
    for n in range(8, 100, 4):
        copied(desk, n, blocking_s=0.5 * (n % 3))
    assert desk.state.intervals.schedule is first
    desk.now_ns += 20 * 10**9
    copied(desk, 100, blocking_s=0.5)
    assert desk.state.intervals.schedule is not first
