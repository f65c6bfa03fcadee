"""A lost rank, and the healthy ranks that leave with it."""

from __future__ import annotations

from typing import Any

from tests.controller.controller_driver import ControllerDriver

from outlast.controller.recovery import shrinking
from outlast.controller.recovery.rank_units import RankUnits
from outlast.events import Decided, WorkerLost
from outlast.launch.policies.policy_files import read_policy
from outlast.transport import messages
from outlast.transport.group_messages import GroupUse
from outlast.transport.rank_spans import pack_ranks

WORLD = 4
ALL = pack_ranks(range(WORLD))


def use(seat: int) -> GroupUse:
    """Return the groups of a rank of HSDP on a 2x2 mesh."""
    unit, shard = divmod(seat, 2)
    return GroupUse((pack_ranks((2 * unit, 2 * unit + 1)),), (pack_ranks((shard, shard + 2)), ALL))


def hybrid(policy: str = "torchft-like") -> ControllerDriver:
    """Return the driver of an open generation that has completed four phases."""
    desk = ControllerDriver(WORLD, spares=0)
    desk.state.recovery = read_policy(policy)
    desk.begin().agent(capacity=WORLD)
    desk.open()
    for seat, worker in enumerate(desk.seats()):
        shards = b"shards %d" % (seat % 2)
        desk.say(worker, messages.StateProtected(schema="s", summary="m", shards=shards))
        desk.say(worker, messages.GroupsUsed(use=use(seat)))
    desk.commit(4)
    return desk


def answer(desk: ControllerDriver, seat: int, n: int, state: str, **more: Any) -> None:
    generation = desk.state.generation
    body = messages.Status(
        generation=generation, n=n, step=n, state=state, use=use(seat), calls="gather", **more
    )
    desk.say(f"w1-{seat}", body)


def test_what_a_healthy_rank_has_committed_stays() -> None:
    desk = hybrid()
    desk.lose("w1-3", 4, slots={"before:4": b"x"})
    answer(desk, 0, 4, "prepared")
    answer(desk, 1, 4, "prepared")
    answer(desk, 2, 5, "idle")  # it alone knows that phase 5 was won
    assert desk.killed() == {"w1-2"} and desk.decision().generation == 1
    desk.lose("w1-2", 5, "idle", slots={"after:5": b"y"}, kind="requested")
    found = desk.decision()
    assert (found.verdict, found.n, found.absent) == ("commit", 5, (2, 3))
    assert found.units == ((0, 1), (2, 3)) and found.slots[2] == {"after:5": b"y"}
    event = desk.emitted(Decided, history=True)[-1]
    assert "rank 3 lost" in event.reason and "healthy: rank 2" in event.reason
    lost = desk.emitted(WorkerLost, history=True)
    assert "rank 2 is healthy, and leaves with its unit" in lost[-1].fault.detail


def test_a_replica_that_is_lost_as_a_whole_is_known() -> None:
    desk = hybrid()
    for seat in (2, 3):
        desk.lose(f"w1-{seat}", 4, slots={"before:4": b"x"})
    answer(desk, 0, 4, "running")
    answer(desk, 1, 4, "running")
    assert desk.decision().absent == (2, 3)


def test_a_later_term_knows_the_units() -> None:
    desk = hybrid()
    later = ControllerDriver(WORLD, spares=0, term=2).begin(journal=desk.journal())
    assert later.state.units.uses == {seat: use(seat) for seat in range(WORLD)}
    assert later.state.units.units == ()
    desk.lose("w1-3", 4, slots={"before:4": b"x"})
    for seat in range(3):
        answer(desk, seat, 4, "running")
    desk.lose("w1-2", 4, slots={"before:4": b"x"}, kind="requested")
    later = ControllerDriver(WORLD, spares=0, term=2).begin(journal=desk.journal())
    assert later.state.units.units == ((0, 1), (2, 3))
    assert later.state.progress.absent == (2, 3)


def test_groups_that_span_the_world_keep_all_ranks() -> None:
    desk = hybrid()
    desk.say("w1-0", messages.GroupsUsed(use=GroupUse(whole=(ALL,))))
    desk.lose("w1-3", 4, slots={"before:4": b"x"})
    for seat in range(3):
        answer(desk, seat, 4, "running")
    event = desk.emitted(Decided, history=True)[-1]
    assert event.rung == "respawn" and desk.killed() == set()
    assert RankUnits(WORLD).units == ((0,), (1,), (2,), (3,))


def test_the_ranks_of_a_unit_begin_at_one_place() -> None:
    desk = hybrid()
    desk.lose("w1-3", 4, slots={"before:4": b"x"})
    for seat in range(3):
        answer(desk, seat, 4, "running")
    desk.lose("w1-2", 4, slots={"before:4": b"y", "after:5": b"z"}, kind="requested")
    assert desk.decision().absent == (2, 3)
    members = desk.state.members
    for seat in (0, 1):
        slots = {"before:9": b"of %d" % seat}
        status = messages.Status(generation=2, n=9, step=9, state="idle", slots=slots)
        members.change(f"w1-{seat}", status=status)
    survivors = [members.workers["w1-0"], members.workers["w1-1"]]
    slots = {seat: dict(members.abandoned_slots[seat]) for seat in (2, 3)}
    assert slots[2].keys() == {"before:4", "after:5"}
    shrinking.return_units(desk.state, survivors, {2, 3}, slots, 9)
    assert slots == {
        2: {"before:9": b"of 0", "left:9:before:4": b"y"},
        3: {"before:9": b"of 1", "left:9:before:4": b"x"},
    }
    empty: dict[int, dict[str, bytes]] = {2: {"before:4": b"y"}, 3: {}}
    shrinking.return_units(desk.state, survivors, {2, 3}, empty, 9)
    assert [empty[seat]["left:9:"] for seat in (2, 3)] == [b"2", b"2"]
