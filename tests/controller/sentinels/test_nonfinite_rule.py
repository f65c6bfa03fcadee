"""The rule for gradients that are not finite: never a loop, and the same decision on all ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.controller.sentinels.nonfinite_rule import (
    NO_STEP,
    NanPolicy,
    NonFiniteCourse,
    NonFiniteWord,
    decide,
    parse_nan,
)
from outlast.errors import UsageError

FINITE = NonFiniteWord()
NAN = "gradient of w (3 of 4 elements)"


def words(*seats: str, tries: int = 0, **more: int) -> dict[int, NonFiniteWord]:
    """Make words by letters: `.` finite, `n` not finite behind the reduction, `o` by its own."""
    return {
        seat: NonFiniteWord(
            tries=tries, found=NAN if kind in "no" else "", is_own=kind == "o", **more
        )
        for seat, kind in enumerate(seats)
    }


def course(found: dict[int, NonFiniteWord], nan: str = "rerun") -> NonFiniteCourse | None:
    """Return the decision's course."""
    decision = decide(found, parse_nan(nan))
    return decision.course if decision else None


@pytest.mark.parametrize(
    ("ranks", "nan", "expected"),
    [
        ("nonn", "rerun", ["rerun", "move", "stop"]),
        ("nonn", "skip:2", ["rerun", "move", "skip"]),
        ("nonn", "stop", ["stop"]),
        ("nnnn", "rerun", ["rerun", "stop"]),  # nobody knows who brought it: nobody is moved
        ("oooo", "rerun", ["rerun", "stop"]),  # all alike: the model
        (".o..", "rerun", ["rerun", "move", "stop"]),  # a shard that no other rank holds
        ("o", "skip:1", ["rerun", "skip"]),
    ],
)
def test_the_order_of_what_is_tried(ranks: str, nan: str, expected: list[str]) -> None:
    found = [course(words(*ranks, tries=tries), nan) for tries in range(len(expected))]
    assert found == expected


def test_a_rank_that_joined_counts_with_the_others() -> None:
    """Rank 1 was moved: its new worker has no tries of its own."""
    found = words("n", "o", "n", tries=2) | {1: NonFiniteWord(found=NAN, is_own=True)}
    decision = decide(found, parse_nan("rerun"))
    assert decision and (decision.course, decision.tries, decision.culprits) == ("stop", 3, (1,))
    assert decision.reporter == 1 and "rank 1 brought it" in decision.detail


def test_a_decision_stands_and_is_learned() -> None:
    found = words("n", "o", tries=2)
    found[0] = NonFiniteWord(tries=3, course="skip", skipped=1)
    assert course(found, "skip:2") == "skip"
    assert course({0: found[0], 1: FINITE}, "skip:2") == "skip"


def test_a_batch_behind_a_skipped_one_moves_nobody() -> None:
    assert course(words("n", "o", tries=1, skipped=1), "skip:2") == "skip"
    assert course(words("n", "o", tries=1, skipped=2), "skip:2") == "stop"


def test_an_optimizer_of_its_own_kind_steps_unless_the_flag_was_given() -> None:
    own = words("n", "n", tries=1, is_custom=True)
    assert course(own, "") == "apply"
    assert course(own, "rerun") == "stop"
    assert course(words("n", "n", tries=1), "") == "stop"


def test_ranks_that_differ_for_another_reason_decide_nothing() -> None:
    assert course(words("..")) is None
    assert course({0: FINITE, 1: NonFiniteWord(tries=1)}) is None


@given(
    st.lists(st.sampled_from(".no"), min_size=1, max_size=6),
    st.sampled_from(["", "rerun", "stop", "skip:1", "skip:3"]),
    st.booleans(),
    st.integers(0, 4),
)
def test_it_ends_and_never_steps_with_what_is_not_finite(
    ranks: list[str], nan: str, custom: bool, skipped: int
) -> None:
    policy = parse_nan(nan)
    if "n" not in ranks and "o" not in ranks:
        return
    seen: list[str] = []
    for tries in itertools.count():
        found = words(*ranks, tries=tries, skipped=skipped, is_custom=custom)
        decision = decide(found, policy)
        assert decision is not None and decision.tries == tries + 1
        assert found[decision.reporter].found
        seen.append(decision.course)
        if decision.course in ("skip", "apply", "stop"):
            break
    assert len(seen) <= 3 and seen.count("rerun") <= 1 and seen.count("move") <= 1
    assert seen[-1] != "apply" or (custom and policy.is_default)
    assert seen[-1] != "skip" or skipped < policy.skips_max


@pytest.mark.parametrize(
    "text", ["skip", "skip:", "skip:0", "skip:-1", "skip:x", "skip:1.5", "skip:9999999", "Rerun",
             "rerun,stop", "skip:1e3", "none", "skip: 3", "nan", "0"],
)  # fmt: skip
def test_what_it_does_not_know_is_refused_with_what_is_possible(text: str) -> None:
    with pytest.raises(UsageError, match="rerun, stop, off, or skip:"):
        parse_nan(text)


def test_the_flag() -> None:
    assert parse_nan("") == NanPolicy(is_default=True)
    assert parse_nan("skip:3").skips_max == 3
    assert not parse_nan("off").watches and not parse_nan("stop").reruns


def test_of_several_steps_in_a_phase_the_first_bad_contribution_counts() -> None:
    """The step spoils the weights of all ranks, and so their next contributions."""
    words = {
        0: NonFiniteWord(found="parameter w", is_own=True, backward=1),
        1: NonFiniteWord(found="parameter w", is_own=True, backward=0),
    }
    decision = decide(words, NanPolicy())
    assert decision is not None and decision.culprits == (1,)
    assert "rank 1 brought it" in decision.detail


def handled(*seats: str, **more: bool) -> dict[int, NonFiniteWord]:
    """Make words on what the script handles, by the letters of `words`; `-`: no step."""
    whats = {".": "", "-": NO_STEP}
    return {
        seat: NonFiniteWord(handled=whats.get(kind, "loss"), is_own=kind == "o", **more)
        for seat, kind in enumerate(seats)
    }


@pytest.mark.parametrize("nan", ["rerun", "skip:2", "stop"])
def test_what_the_script_handles_is_run_again_and_accepted(nan: str) -> None:
    assert course(handled(*".n.."), nan) == "accept"
    assert course(handled(*"----"), nan) == "accept"
    assert course(handled(*"....", is_accepted=True), nan) is None, "the next attempt counts"


def test_a_gradient_that_would_be_applied_comes_first() -> None:
    mixed = handled(*".nn.") | {3: NonFiniteWord(found=NAN)}
    assert course(mixed) == "rerun"


def test_the_ranks_that_brought_what_the_script_handles_are_named() -> None:
    decision = decide(handled(*"-on-"), parse_nan("rerun"))
    assert decision is not None
    assert (decision.culprits, decision.reporter) == ((1,), 1)
    assert decision.detail == "the loss is not finite on every rank; rank 1 brought it"
    nobody = decide(handled(*"----"), parse_nan("rerun"))
    assert nobody is not None and nobody.detail == NO_STEP
