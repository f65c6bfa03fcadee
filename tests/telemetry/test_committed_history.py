"""Check of committed phases against the decisions of a journal."""

from __future__ import annotations

from outlast.controller.inputs import AnyEntry, DecisionMade, Opened, TermBegan
from outlast.telemetry.committed_history import CommittedPhase, check_history
from outlast.transport.messages import Checkpointed

WORLD = 2


def decided(generation: int, n: int, verdict: str = "redo", *, copy: bool = False) -> DecisionMade:
    return DecisionMade(
        generation=generation,
        n=n,
        step=n,
        verdict=verdict,
        seats=("a", "b"),
        copy=Checkpointed(n=n, step=n, path="memory") if copy else None,
    )


def opened(generation: int, n: int) -> list[AnyEntry]:
    return [Opened(generation=generation, n=n)]


def done(
    generation: int, *phases: int, worker: str = "", content: str = ""
) -> list[CommittedPhase]:
    return [
        CommittedPhase(worker or name, seat, generation, n, (content or n,))
        for n in phases
        for seat, name in enumerate(("a", "b"))
    ]


FIRST: list[AnyEntry] = [decided(1, 0, "start"), *opened(1, 0)]
REDONE: list[AnyEntry] = [*FIRST, decided(2, 3), *opened(2, 3)]


def only(problems: list[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_run_with_a_redo_a_commit_and_a_start_is_linearizable() -> None:
    journal = [
        *REDONE,
        decided(3, 5, "commit"),
        *opened(3, 5),
        decided(4, 2, "start"),
        *opened(4, 2),
    ]
    history = [*done(1, 1, 2, 3), *done(2, 4), done(2, 5)[0], done(2, 5)[1], *done(3, 6)]
    assert check_history({1: journal}, [*history, *done(4, 3, content="other")]) == []


def test_a_phase_that_one_rank_alone_completed_may_be_redone() -> None:
    assert check_history({1: REDONE}, [*done(1, 1, 2, 3), done(1, 4)[0], *done(2, 4)]) == []


def test_a_committed_phase_is_not_lost() -> None:
    found = check_history({1: REDONE}, [*done(1, 1, 2, 3, 4), *done(2, 4)])
    assert only(found) == "all ranks committed phase 4, and 3 was decided next"


def test_a_phase_taken_back_by_a_rebuild_is_none_that_was_lost() -> None:
    journal = [*FIRST, decided(2, 3, copy=True), *opened(2, 3)]
    assert check_history({1: journal}, [*done(1, 1, 2, 3, 4), *done(2, 4)]) == []


def test_a_lost_rank_may_be_one_phase_ahead_of_those_that_take_one_back() -> None:
    journal = [*FIRST, decided(2, 3, copy=True), *opened(2, 3)]
    assert check_history({1: journal}, [*done(1, 1, 2, 3, 4), done(1, 5)[0], *done(2, 4)]) == []
    beyond = [*done(1, 1, 2, 3, 4, 5), done(1, 6)[0], *done(2, 4)]
    found = check_history({1: journal}, beyond)
    assert only(found) == "phase 6 was committed in generation 1, and 3 was decided next"


def test_no_phase_is_committed_twice_with_another_content() -> None:
    history = [*done(1, 1, 2, 3), done(1, 4)[0], *done(2, 4, content="other")]
    assert "('other',), another rank as (4,)" in check_history({1: REDONE}, history)[0]


def test_two_groups_do_not_commit() -> None:
    """A deposed owner began generation 2, after its successor had read its journal."""
    segments = {1: REDONE, 2: [TermBegan(read={1: 2}), decided(2, 2), *opened(2, 2)]}
    assert check_history(segments, [*done(1, 1, 2), *done(2, 3)]) == []
    strangers = [phase._replace(worker=f"{phase.worker}-old") for phase in done(2, 4)]
    assert all("two workers of one rank" in text for text in check_history(
        segments, [*done(1, 1, 2), *done(2, 3), *strangers]
    ))  # fmt: skip
    beside = check_history({1: REDONE, 2: [TermBegan(read={1: 2})]}, [*done(1, 1), *done(2, 4)])
    assert "which no decision that counts has begun" in only(beside)


def test_a_worker_does_not_go_back_to_an_older_generation() -> None:
    history = [*done(1, 1, 2, 3), *done(2, 4), done(1, 5)[0]]
    assert "after one in generation 2" in check_history({1: REDONE}, history)[0]


def test_a_generation_commits_nothing_before_its_place_and_before_it_is_open() -> None:
    assert "stands before 4" in check_history({1: REDONE}, [*done(1, 1, 2, 3), done(2, 2)[0]])[0]
    closed = [*FIRST, decided(2, 3)]
    assert "was not open" in check_history({1: closed}, [*done(1, 1, 2, 3), done(2, 4)[0]])[0]


def test_a_journal_that_contradicts_itself_is_named() -> None:
    backwards = [*FIRST, decided(2, 3), *opened(2, 2), decided(2, 1)]
    assert len(check_history({1: backwards}, [])) == 3
