"""Verdicts of audits over random replica sets: deviating ranks and tensors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.audit.audit_records import AuditVerdict, ReplicaDigests, judge

KINDS = ("buffers", "optimizers", "parameters")
States = dict[int, dict[str, dict[str, bytes]]]


def holdings(states: States, sets: dict[int, bytes] | None = None) -> dict[int, ReplicaDigests]:
    """Every rank's report: a kind's digest is all of its names and digests."""
    return {
        rank: ReplicaDigests(
            (sets or {}).get(rank, b""),
            {kind: repr(sorted(names.items())).encode() for kind, names in state.items()},
        )
        for rank, state in states.items()
    }


def settled(states: States, sets: dict[int, bytes] | None = None) -> AuditVerdict:
    """The verdict when everybody who is asked answers."""
    reports = holdings(states, sets)
    verdict = judge(reports, {})
    if verdict.outcome != "ask":
        return verdict
    names = {rank: {kind: states[rank][kind] for kind in verdict.kinds} for rank in verdict.ask}
    return judge(reports, names)


def equal(ranks: int) -> States:
    state = {kind: {f"{kind}.{index}": b"0" for index in range(3)} for kind in KINDS}
    return {rank: {kind: dict(names) for kind, names in state.items()} for rank in range(ranks)}


@given(ranks=st.integers(2, 9), wrong=st.sets(st.integers(0, 8)), kind=st.sampled_from(KINDS))
def test_a_minority_is_named_with_its_tensor(ranks: int, wrong: set[int], kind: str) -> None:
    wrong = {rank for rank in wrong if rank < ranks}
    states = equal(ranks)
    for rank in wrong:
        states[rank][kind][f"{kind}.1"] = b"wrong"
    verdict = settled(states)
    assert verdict.compared == ranks
    if not wrong or len(wrong) == ranks:
        assert verdict.outcome == "agreed"
    elif 2 * len(wrong) == ranks:
        assert verdict.outcome == "no majority"
        assert verdict.tensors == (f"{kind}.1",)
    else:
        few = wrong if 2 * len(wrong) < ranks else set(range(ranks)) - wrong
        assert (verdict.outcome, set(verdict.minority)) == ("minority", few)
        assert verdict.tensors == (f"{kind}.1",)
        assert set(verdict.majority) == set(range(ranks)) - few


@given(values=st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_only_more_than_half_is_a_majority(values: list[int]) -> None:
    states = equal(len(values))
    for rank, value in enumerate(values):
        states[rank]["parameters"]["parameters.0"] = bytes([value])
    verdict = settled(states)
    most = max(values.count(value) for value in values)
    if most == len(values):
        assert verdict.outcome == "agreed"
    elif 2 * most > len(values):
        assert verdict.outcome == "minority"
        assert len(verdict.minority) == len(values) - most
    else:
        assert verdict.outcome == "no majority"
    assert len(verdict.minority) + len(verdict.majority) in (0, len(values))


def test_shards_are_not_compared_with_each_other() -> None:
    states = equal(6)
    for rank in range(6):
        states[rank]["parameters"]["parameters.0"] = bytes([rank % 2])
    sets = {rank: bytes([rank % 2]) for rank in range(6)}
    assert settled(states, sets) == AuditVerdict(outcome="agreed", compared=6)
    states[4]["optimizers"]["optimizers.2"] = b"wrong"
    verdict = settled(states, sets)
    assert (verdict.outcome, verdict.minority, verdict.majority) == ("minority", (4,), (0, 2))


def test_a_rank_without_a_replica_is_not_compared() -> None:
    states = equal(3)
    assert settled(states, {0: b"a", 1: b"b", 2: b"c"}).compared == 0
    assert settled(states, {0: b"a", 1: b"a", 2: b"c"}).compared == 2


def test_what_one_rank_holds_as_its_own_buffer_is_not_compared() -> None:
    states = equal(3)
    del states[1]["buffers"]["buffers.1"]
    assert settled(states).outcome == "agreed"
    del states[1]["optimizers"]["optimizers.1"]
    verdict = settled(states)
    assert (verdict.minority, verdict.tensors) == ((1,), ("optimizers.1",))


def test_without_answers_kinds_are_named() -> None:
    states = equal(3)
    states[2]["parameters"]["parameters.0"] = b"wrong"
    verdict = judge(holdings(states), {}, may_ask=False)
    assert (verdict.outcome, verdict.minority) == ("minority", (2,))
    assert verdict.tensors == ("parameters",)


def test_a_whole_kind_that_is_missing_is_a_difference() -> None:
    states = equal(3)
    del states[0]["optimizers"]
    verdict = judge(holdings(states), {}, may_ask=False)
    assert (verdict.minority, verdict.tensors) == ((0,), ("optimizers",))


def test_few_are_asked_and_few_are_named() -> None:
    states = equal(40)
    for rank in range(40):
        states[rank]["parameters"] |= {f"p{index}": bytes([rank]) for index in range(99)}
    verdict = judge(holdings(states), {})
    assert (verdict.outcome, len(verdict.ask), verdict.kinds) == ("ask", 8, ("parameters",))
    verdict = settled(states)
    assert (len(verdict.tensors), verdict.outcome) == (16, "no majority")
    assert verdict.more > 80
