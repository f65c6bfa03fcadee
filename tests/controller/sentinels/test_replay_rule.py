"""The rule for replays: right rings, the wrong rank by majority, and nobody blamed without one."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outlast.controller.sentinels.replay_rule import (
    BLOCK,
    ReplayResult,
    ReplayVerdict,
    ReplayWord,
    decide,
    disputed,
    jury,
    ring_of,
    rings,
)

RIGHT, WRONG = b"right", b"wrong"


def words(hosts: str, unfit: str = "") -> list[ReplayWord]:
    """Make words of ranks by the letters of their hosts."""
    return [
        ReplayWord(rank, b"all", host, "odd" if str(rank) in unfit else "")
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("hosts", "unfit", "expected"),
    [
        ("aabb", "", [(0, 2, 1, 3)]),  # each replays a rank of the other host
        ("aaab", "", [(0, 3, 1, 2)]),
        ("aaa", "1", [(0, 2)]),
        ("ab", "1", []),
    ],
)
def test_neighbours_are_on_other_hosts(
    hosts: str, unfit: str, expected: list[tuple[int, ...]]
) -> None:
    assert rings(words(hosts, unfit)) == expected


def test_a_rank_alone_in_its_block_is_not_replayed() -> None:
    found = rings(words("a" * (BLOCK + 1)))
    assert [len(ring) for ring in found] == [BLOCK]
    assert ring_of(BLOCK, found) == ()
    assert ring_of(3, found)[0] == 3 and ring_of(3, found)[-1] == 2


@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=80), st.data())
def test_one_wrong_rank_is_the_first_of_the_jury_or_its_witness(
    hosts: list[str], data: st.DataObject
) -> None:
    """Every rank is in one ring at most; a wrong one is in the jury, whatever shows its error."""
    found = rings(words("".join(hosts)))
    members = [rank for ring in found for rank in ring]
    assert len(members) == len(set(members)) >= len(hosts) - 1
    wrong = data.draw(st.sampled_from(members))
    ring = next(ring for ring in found if wrong in ring)
    shows = data.draw(st.sampled_from(["subject", "witness", "both"]))
    results = {
        rank: ReplayResult(
            rank,
            WRONG if rank == wrong and shows != "witness" else RIGHT,
            WRONG + b"!" if rank == wrong and shows != "subject" else RIGHT,
        )
        for rank in ring
    }
    subject = disputed(ring, results)
    jurors = jury(ring, subject)
    assert wrong in jurors[:2] and len(jurors) == min(len(ring), 5)
    if shows == "both" and len(ring) > 2:
        assert subject == wrong


def verdict(first: str, second: str, proved: str = "01234") -> ReplayVerdict:
    """Judge results by letters, of ranks 0, 1, ...; `first`: of the subject and its witness."""
    return decide(
        range(len(second)),
        {rank: each.encode() for rank, each in enumerate(first)},
        {rank: each.encode() if each != "-" else b"" for rank, each in enumerate(second)},
        [int(each) for each in proved],
    )


@pytest.mark.parametrize(
    ("first", "second", "outcome", "wrong"),
    [
        ("xr", "rrr", "transient", (0,)),  # the subject's own attempt
        ("rx", "rrr", "transient", (1,)),  # its replay
        ("xr", "xrr", "lasting", (0,)),
        ("xr", "yrr", "lasting", (0,)),  # wrong both times, though not alike
        ("rx", "rxrrr", "lasting", (1,)),
        ("xr", "rrx", "transient", (2,)),  # another one is wrong for the first time
        ("xr", "rr", "transient", (0,)),  # two ranks, and one does not repeat
        ("xr", "xr", "pair", (0, 1)),
        ("xr", "yr", "unrepeatable", (0, 1)),
        ("xr", "xyz", "unrepeatable", (0, 1)),  # a function that does not repeat anywhere
        ("xr", "xxrr", "unrepeatable", (0, 1)),
        ("xr", "---", "unrepeatable", (0, 1)),  # nobody could
    ],
)
def test_verdicts(first: str, second: str, outcome: str, wrong: tuple[int, ...]) -> None:
    found = verdict(first, second)
    assert (found.outcome, found.wrong) == (outcome, wrong)


@pytest.mark.parametrize(("first", "second"), [("xr", "xrr"), ("xr", "rrr"), ("xr", "xrrrr")])
def test_a_rank_that_was_never_equal_is_not_blamed(first: str, second: str) -> None:
    """Code that depends on the rank gives the same picture."""
    assert verdict(first, second, proved="1234").outcome == "unproved"


def test_what_counts_shows_the_wrong_rank_alone() -> None:
    """The controller judges by these digests."""
    assert verdict("xr", "rrr").digests == {0: b"x", 1: b"r", 2: b"r"}
    assert verdict("xr", "yrr").digests == {0: b"y", 1: b"r", 2: b"r"}


@given(st.text("rxy", min_size=2, max_size=2), st.text("rxy-", min_size=2, max_size=5))
def test_only_a_minority_against_equal_others_is_blamed(first: str, second: str) -> None:
    assume(first[0] != first[1])
    found = verdict(first, second)
    if found.outcome in ("transient", "lasting"):
        right = {digest for rank, digest in found.digests.items() if rank not in found.wrong}
        assert len(right) == 1 and 0 < len(found.wrong) < len(second)
        assert 2 * len(found.wrong) < len(second) or len(second) == 2
    else:
        assert found.outcome in ("pair", "unrepeatable")
