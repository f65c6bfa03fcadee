"""Meetings of the ranks of a host, which their agent gathers."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from outlast.transport import messages
from outlast.transport.rank_spans import pack_ranks, unpack_ranks
from outlast.transport.rendezvous_messages import (
    HostMeetings,
    MeetEntry,
    MeetingRelay,
    are_whole,
    gathered,
)

WORLD = 8
GROUPS = st.lists(
    st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True), min_size=1, max_size=4
)
HOSTS = st.lists(st.integers(0, 3), min_size=WORLD, max_size=WORLD)  # by rank
Received = dict[tuple[int, str], tuple[object, ...]]


def meet_of(ranks: list[int], seat: int, name: str = "g", generation: int = 1) -> messages.Meet:
    """Return what a rank sends for a group; each of its parts differs from all others."""
    parts = b"".join(b"%02dto%02d/%s" % (seat, to, name.encode()[-1:]) for to in ranks)
    return messages.Meet(
        generation=generation,
        name=name,
        ranks=pack_ranks(ranks),
        value=b"%d" % seat,
        parts=parts,
        address=f"host:{seat}",
    )


def through_one_relay(groups: list[list[int]]) -> Received:
    """Return what each rank receives for each group from a relay that has all ranks."""
    relay, found = MeetingRelay(), Received()
    for number, ranks in enumerate(groups):
        for seat in ranks:
            for to, met in relay.relay(seat, meet_of(ranks, seat, f"g{number}")):
                assert isinstance(met, messages.Met)
                found[to, met.name] = met.values, met.addresses, met.parts[to]
    return found


@given(GROUPS, HOSTS, st.integers())
def test_ranks_receive_through_their_hosts_what_one_relay_gives_them(
    groups: list[list[int]], hosts: list[int], seed: int
) -> None:
    meetings = {host: HostMeetings() for host in hosts}
    for seat, host in enumerate(hosts):
        meetings[host].connect(1, seat)
    comers = [(number, seat) for number, ranks in enumerate(groups) for seat in ranks]
    random.Random(seed).shuffle(comers)
    found = Received()
    passed_on: dict[str, list[messages.HostMeets]] = {}
    for number, seat in comers:
        answer = meetings[hosts[seat]].add(seat, meet_of(groups[number], seat, f"g{number}"))
        if isinstance(answer, messages.Met):
            assert {hosts[rank] for rank in groups[number]} == {hosts[seat]}
            for to, part in answer.parts.items():
                found[to, answer.name] = answer.values, answer.addresses, part
        elif answer is not None:
            passed_on.setdefault(answer.name, []).append(answer)
    for name, of_hosts in passed_on.items():
        ranks = list(unpack_ranks(of_hosts[0].ranks))
        assert len(of_hosts) == len({hosts[rank] for rank in ranks}) > 1  # one of each host
        entries = {rank: entry for each in of_hosts for rank, entry in each.entries.items()}
        places = {rank: place for place, rank in enumerate(ranks)}
        met = gathered(1, name, [entries[rank] for rank in ranks], places)
        found.update({(to, name): (met.values, met.addresses, met.parts[to]) for to in ranks})
    assert found == through_one_relay(groups)


def test_ranks_do_not_wait_for_one_that_connects_late() -> None:
    """A reconnected agent may receive Connect of its ranks one by one."""
    meetings = HostMeetings()
    meetings.connect(1, 0)
    alone = meetings.add(0, meet_of([0, 1], 0))
    meetings.connect(1, 1)
    late = meetings.add(1, meet_of([0, 1], 1))
    again = meetings.add(0, meet_of([0, 1], 0, "h"))
    for each, seat in ((alone, 0), (late, 1), (again, 0)):
        assert isinstance(each, messages.HostMeets) and set(each.entries) == {seat}


def test_a_generation_forgets_the_ranks_of_the_one_before() -> None:
    meetings = HostMeetings()
    for seat in (0, 1):
        meetings.connect(1, seat)
    assert meetings.add(0, meet_of([0, 1], 0)) is None
    meetings.connect(2, 0)  # rank 1 has moved to another host
    answer = meetings.add(0, meet_of([0, 1], 0, generation=2))
    assert isinstance(answer, messages.HostMeets) and set(answer.entries) == {0}
    late = meetings.add(1, meet_of([0, 1], 1))  # of the closed generation: the controller drops it
    assert isinstance(late, messages.HostMeets) and late.generation == 1
    meetings.connect(1, 1)
    answer = meetings.add(0, meet_of([0, 1], 0, "h", generation=2))
    assert isinstance(answer, messages.HostMeets)


def test_numbers_for_another_count_of_ranks_are_not_answered_here() -> None:
    meetings = HostMeetings()
    for seat in (0, 1):
        meetings.connect(1, seat)
    whole, other = meet_of([0, 1], 0), meet_of([0, 1], 1)
    short = messages.Meet(
        generation=1, name="g", ranks=other.ranks, value=b"", parts=b"8 bytes.", address="host:1"
    )
    assert meetings.add(0, whole) is None
    answer = meetings.add(1, short)
    assert isinstance(answer, messages.HostMeets) and set(answer.entries) == {0, 1}
    assert not are_whole(answer.entries.values(), 2)
    assert answer.entries[0] == MeetEntry(whole.value, whole.parts, whole.address)
