"""Shares of votes, by which ranks see whether all replica sets are equal."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outlast.transport import messages
from outlast.worker.auditor import Auditor, VoteComparison, _ReplicaSet
from outlast.worker.state.bit_flips import flip_bit
from outlast.worker.state.protected_state import ProtectedState


def held() -> ProtectedState:
    torch.manual_seed(0)
    return ProtectedState({"model": nn.Linear(4, 4)}, {})


ONE, OTHER = held(), held()
WEIGHT = dict(OTHER.audited)["model.weight"]


def comparisons(sets: list[int], wrong: set[int]) -> list[VoteComparison]:
    found = [_ReplicaSet(rank, b"%d" % number, (), False) for rank, number in enumerate(sets)]
    return [
        VoteComparison(OTHER if rank in wrong else ONE, 100, found, rank)
        for rank in range(len(sets))
    ]


@settings(max_examples=50)
@given(
    sets=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    wrong=st.sets(st.integers(0, 11)),
    bit=st.integers(0, 8 * 64 - 1),
)
def test_shares_add_up_to_nothing_where_every_replica_set_is_equal(
    sets: list[int], wrong: set[int], bit: int
) -> None:
    wrong = {rank for rank in wrong if rank < len(sets)}
    flip_bit("weight", WEIGHT, bit)
    try:
        total = sum(each.share(3) for each in comparisons(sets, wrong)) % (1 << 64)
    finally:
        flip_bit("weight", WEIGHT, bit)
    mixed = {
        number
        for number in sets
        if len({rank in wrong for rank, each in enumerate(sets) if each == number}) > 1
    }
    assert bool(total) == bool(mixed)


def test_what_differs_by_design_is_left_out_on_all_ranks() -> None:
    """A successor learns it from the others."""
    sets = [_ReplicaSet(0, b"", ("gradients",), True), _ReplicaSet(1, b"", (), False)]
    for rank in range(2):
        votes = VoteComparison(ONE, 100, sets, rank)
        votes.share(0)
        assert votes.taken is not None and "gradients" not in votes.taken.names()
        assert votes.has_equal_gradients


class Owner:
    """A worker whose votes are compared: its state, and what it has sent."""

    def __init__(self, held: ProtectedState) -> None:
        self.held, self.sent = held, list[object]()

    def protected_state(self) -> ProtectedState:
        return self.held

    def try_send(self, body: object) -> None:
        self.sent.append(body)

    def report_trouble(self, error: BaseException) -> None:
        raise error

    def reach(self, where: str) -> None:
        assert where in ("reduced", "committed")

    def note(self, text: str) -> None:
        raise AssertionError(text)


def test_what_is_left_out_and_was_equal_is_known_in_the_next_generation() -> None:
    status = SimpleNamespace(opened=1, is_open=True, n=0, step=0)
    groups = SimpleNamespace(world=2, seat=0, gather_bytes=lambda mine: [mine, _other(mine)])
    auditor = Auditor(status, groups, Owner(held()), every=100, patience_s=1.0)  # type: ignore[arg-type]
    for status.opened in (1, 2):
        assert auditor.before_vote(compares=True) == 0, "all of the state is audited behind it"
        status.n, status.step = status.n + 1, status.step + 1
        auditor.completed("step")
        auditor.hear(messages.AuditAgreed(generation=status.opened, n=status.n))
        share = auditor.before_vote(compares=True)
        assert share != 0
        if status.opened == 1:
            assert auditor.dispute() == "replicas hold different bytes"
            answer = messages.AuditAgreed(generation=1, n=1, again=1, without=("gradients",))
            auditor.hear(answer)
            auditor.before_vote(compares=True)
        votes = auditor._votes
        assert votes is not None and votes.without == {"gradients"}


def test_replicas_share_a_pass_once_their_gradients_were_equal() -> None:
    status = SimpleNamespace(opened=1, is_open=True, n=0, step=0)
    groups = SimpleNamespace(world=2, seat=0, gather_bytes=lambda mine: [mine, _other(mine)])
    auditor = Auditor(status, groups, Owner(held()), every=100, patience_s=1.0)  # type: ignore[arg-type]
    assert auditor.equal_gradients() == (0, 1)
    for _ in range(2):
        assert auditor.equal_gradients() == (0, 1), "not compared yet"
        auditor.before_vote(compares=True)
        status.n, status.step = status.n + 1, status.step + 1
        auditor.completed("step")
        auditor.hear(messages.AuditAgreed(generation=1, n=status.n))
    assert auditor.equal_gradients() == (0, 2)
    status.opened = 2
    assert auditor.equal_gradients() == (0, 1), "of another generation"
    status.opened = 1
    assert auditor._votes is not None
    auditor._votes.without.add("gradients")
    assert auditor.equal_gradients() == (0, 1)


def _other(mine: bytes) -> bytes:
    """Return what the other rank sends: another digest of the same window, its own rank."""
    value = msgspec.msgpack.decode(mine)
    if len(value) == 2:
        return msgspec.msgpack.encode((value[0], b"another"))
    return msgspec.msgpack.encode([1, *value[1:]])


def test_state_is_covered_once_all_windows_were_equal() -> None:
    votes = comparisons([0, 0], set())[0]
    assert votes.since() == (-1, -1)
    votes.share(4)
    assert votes.since() == (-1, -1) and not votes.has_equal_gradients
    votes.won(7, 4)
    assert votes.since() == (7, 4) and votes.has_equal_gradients
    votes.won(9, 6)  # a phase whose vote compared nothing
    assert votes.since() == (7, 4)


def test_a_rank_without_a_replica_digests_nothing() -> None:
    votes = comparisons([0, 1], set())[1]
    assert votes.share(0) == 0 and votes.taken is None
