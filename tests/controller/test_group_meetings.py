"""Meetings of the ranks of a group, and values that they publish."""

from __future__ import annotations

from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.transport import messages
from outlast.transport.rank_spans import pack_ranks
from outlast.transport.rendezvous_messages import MeetEntry


def running(world: int) -> ControllerDriver:
    return ControllerDriver(world=world).begin().open()


def meets(entries: dict[int, bytes], generation: int = 1) -> messages.HostMeets:
    """Return what ranks of a host have for the group of ranks 0 and 2."""
    return messages.HostMeets(
        generation=generation,
        name="g",
        ranks=pack_ranks((0, 2)),
        entries={rank: MeetEntry(b"%d" % rank, part, "a:1") for rank, part in entries.items()},
    )


def test_ranks_of_a_group_receive_their_parts_once_all_have_come() -> None:
    desk = running(3)
    desk.say("w1-2", meets({2: b"2 to 0 .2 to 2 ."}))
    desk.say("w1-2", meets({2: b"2 to 0 .2 to 2 ."}))  # a repeated frame of another number
    desk.say("w1-1", meets({1: b"not in the group", 7: b"nor in the world"}))
    desk.say("w1-0", meets({0: b"0 to 0 .0 to 2 ."}, generation=0))
    assert not desk.sent(messages.Met, history=True)
    desk.say("w1-0", meets({0: b"0 to 0 .0 to 2 ."}))
    assert [worker for worker, _ in desk.sent(messages.Met)] == ["w1-0", "w1-2"]
    (_, met), _ = desk.sent(messages.Met)
    assert met.values == (b"0", b"2")
    assert met.parts == {0: b"0 to 0 .2 to 0 .", 2: b"0 to 2 .2 to 2 ."}
    assert not desk.state.shared.meets and not desk.state.shared.missing


def test_ranks_of_a_host_meet_in_one_message() -> None:
    desk = running(3)
    desk.say("w1-2", meets({0: b"0 to 0 .0 to 2 .", 2: b"2 to 0 .2 to 2 ."}))
    assert [worker for worker, _ in desk.sent(messages.Met)] == ["w1-0", "w1-2"]


def test_a_host_does_not_speak_for_ranks_of_another_one() -> None:
    desk = ControllerDriver(world=3, spares=0).begin()
    desk.agent(capacity=2)
    desk.agent(capacity=1, agent="b")
    homes = {name: each.agent for name, each in desk.state.members.workers.items()}

    def say(worker: str, body: messages.WorkerBody) -> None:
        desk.say(worker, body, agent=homes[worker])

    for name in homes:
        say(name, messages.WorkerHello(pid=1, fingerprint={}, address=f"{name}:1"))
    for name in homes:
        say(name, messages.WorkerReady(generation=1, n=0))
    seats = desk.seats()
    assert desk.state.mode == "connecting" and len({homes[seats[0]], homes[seats[2]]}) == 2
    parts = {0: b"0 to 0 .0 to 2 .", 2: b"2 to 0 .2 to 2 ."}
    say(seats[0], meets(parts))
    assert not desk.sent(messages.Met) and set(desk.state.shared.meets) == {("g", 0)}
    say(seats[2], meets(parts))
    assert {worker for worker, _ in desk.sent(messages.Met)} == {seats[0], seats[2]}
    assert [set(met.parts) for _, met in desk.sent(messages.Met)] == [{0}, {2}]


def test_a_rank_with_numbers_for_another_count_of_ranks_is_given_up() -> None:
    desk = running(3)
    desk.say("w1-0", meets({0: b"0 to 0 .", 2: b"2 to 0 .2 to 2 ."}))
    assert not desk.sent(messages.Met)
    (noticed,) = desk.emitted(events.Noticed)
    assert noticed.fault.kind == "mismatch" and "another count" in noticed.fault.detail


def test_rendezvous_values_reach_the_other_ranks_of_a_group() -> None:
    desk = running(3)
    for ranks, receivers in (((0, 1, 2), {"w1-1", "w1-2"}), ((0, 2), {"w1-2"})):
        put = messages.Put(generation=1, key="k", value=b"v", ranks=pack_ranks(ranks))
        desk.say("w1-0", put)
        assert {w for w, _ in desk.sent(messages.RendezvousValue)} == receivers
    desk.say("w1-0", messages.Put(generation=0, key="k", value=b"v", ranks=pack_ranks((0, 1, 2))))
    assert not desk.sent(messages.RendezvousValue) and desk.state.inbox.dropped == 1
