"""Hang reports of simulated jobs with a known cause, and of single cases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.fleet.flight_recorder.recorded_jobs import Job, dump, entry, played, read

from outlast.fleet.flight_recorder.hang_report import HangReport, analyse_dumps
from outlast.fleet.flight_recorder.recorder_dumps import RecorderDump, RecorderEntry

ALL3 = {"0": (0, 1, 2)}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Job, int, int]:
    world = draw(st.integers(2, 5))
    subset = st.sets(st.integers(0, world - 1), min_size=2).map(lambda ranks: tuple(sorted(ranks)))
    groups = (tuple(range(world)), *draw(st.lists(subset, max_size=3)))
    calls = tuple(draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=20)))
    culprit = draw(st.integers(0, world - 1))
    own = sum(culprit in groups[call] for call in calls)
    return Job(world, groups, calls), culprit, draw(st.integers(0, max(0, own - 1)))


@given(jobs(), st.booleans())
@settings(max_examples=60)
def test_the_absent_rank_is_named(case: tuple[Job, int, int], gloo: bool) -> None:
    job, culprit, stops_at = case
    dumps, waits = played(job, culprit, stops_at, gloo=gloo)
    report = analyse_dumps(read(dumps))
    assert bool(report.stuck) == waits
    if waits:
        assert (report.ranks, report.stuck[0].kind) == ((culprit,), "absent")
        assert report.confidence == "sure"
        assert not report.circle
        assert f"ank {culprit} " in report.verdict


@given(jobs(), st.booleans(), st.booleans(), st.integers(1, 8), st.sets(st.integers(0, 4)))
@example(
    (Job(3, ((0, 1, 2), (1, 2), (0, 1)), (0, 0, 0, 1, 2, 1)), 0, 3),
    *(True, True, 2),
    set(),
).via("a circle whose records have been overwritten")
@settings(max_examples=80)
def test_no_innocent_rank_is_blamed_with_certainty(
    case: tuple[Job, int, int], gloo: bool, told: bool, kept: int, lost: set[int]
) -> None:
    """With records written over, dumps missing and members untold, what is sure is true."""
    job, culprit, stops_at = case
    dumps, waits = played(job, culprit, stops_at, gloo=gloo, told=told, kept=kept)
    left = {rank: one for rank, one in dumps.items() if rank not in lost}
    if not left:
        return
    report = analyse_dumps(read(left), world=job.world)
    if not waits:
        assert not any(one.kind == "absent" for one in report.stuck)
    if report.confidence == "sure":
        assert report.ranks == (culprit,)
    assert set(report.missing) == lost & set(dumps)


def _report(*dumps: RecorderDump) -> HangReport:
    return analyse_dumps(read(dict(enumerate(dumps))))


def _three(*last: RecorderEntry) -> HangReport:
    """Three ranks that did one all-reduce together, and then this."""
    first = entry(seq=1, record=0)
    return _report(*(dump(first, one, groups=ALL3) for one in last))


def _entered(name: str = "nccl:all_reduce", state: str = "started", **more: Any) -> RecorderEntry:
    return entry(name, 2, 1, state=state, retired=False, **more)


def test_a_rank_that_entered_another_kind_differs() -> None:
    report = _three(_entered(), _entered("nccl:broadcast"), _entered())
    assert (report.stuck[0].kind, report.ranks) == ("mismatch", (1,))
    assert "broadcast instead of all_reduce" in report.verdict


def test_a_rank_that_entered_another_size_differs_and_a_shape_does_not() -> None:
    other: dict[str, Any] = {"input_sizes": ((2, 3),), "output_sizes": ((2, 3),)}
    report = _three(_entered(), _entered(), _entered(**other))
    assert (report.stuck[0].kind, report.ranks) == ("mismatch", (2,))
    assert "6 elements instead of all_reduce of 4 elements" in report.verdict
    same: dict[str, Any] = {"input_sizes": ((2, 2),), "output_sizes": ((2, 2),)}
    assert _three(_entered(), _entered(), _entered(**same)).stuck[0].kind == "unfinished"


def test_a_rank_that_entered_another_dtype_differs() -> None:
    half: dict[str, Any] = {"input_dtypes": ("Half",), "output_dtypes": ("Half",)}
    report = _three(_entered(**half), _entered(), _entered())
    assert (report.stuck[0].kind, report.ranks) == ("mismatch", (0,))


def test_two_ranks_that_differ_are_both_named() -> None:
    groups = {"0": (0, 1)}
    report = _report(
        dump(entry(state="started"), groups=groups),
        dump(entry("nccl:broadcast", state="started"), groups=groups),
    )
    assert (report.stuck[0].kind, report.ranks, report.confidence) == (
        "mismatch", (0, 1), "likely",
    )  # fmt: skip


def test_a_completed_mismatch_is_not_the_cause_of_a_hang() -> None:
    root = entry("nccl:gather", seq=1, output_sizes=((4,), (4,), (4,)))
    leaf = entry("nccl:gather", seq=1, output_sizes=())
    waits = entry(seq=2, record=1, state="started")
    report = _report(
        dump(root, waits, groups=ALL3), dump(leaf, waits, groups=ALL3), dump(leaf, groups=ALL3)
    )
    assert (report.stuck[0].kind, report.stuck[0].seq, report.ranks) == ("absent", 2, (2,))


@pytest.mark.parametrize(("taken", "kind"), [(4, "unfinished"), (5, "mismatch")])
def test_an_exchange_is_judged_by_its_sums(taken: int, kind: str) -> None:
    def part(given: int, taken: int) -> RecorderEntry:
        return _entered("nccl:all_to_all", input_sizes=((given,),), output_sizes=((taken,),))

    assert _three(part(2, 1), part(3, 4), part(taken, 4)).stuck[0].kind == kind


def test_a_collective_that_all_entered_and_none_left_blames_the_network() -> None:
    report = _three(_entered(), _entered(), _entered())
    assert (report.stuck[0].kind, report.ranks, report.confidence) == ("unfinished", (), "likely")
    assert "network" in report.verdict


def test_a_rank_that_only_scheduled_the_collective_is_named() -> None:
    report = _three(_entered(), _entered(state="scheduled"), _entered())
    assert (report.stuck[0].kind, report.ranks) == ("unfinished", (1,))


def test_without_start_times_no_rank_counts_as_not_started() -> None:
    """As NCCL records without TORCH_NCCL_ENABLE_TIMING: scheduled, then completed."""
    untimed: dict[str, Any] = {"time_discovered_started_ns": None}
    ended = entry(seq=1, record=0, **untimed)
    inside = _entered(state="scheduled", **untimed)
    report = _report(*[dump(ended, inside, groups=ALL3)] * 3)
    assert (report.stuck[0].kind, report.ranks, report.confidence) == ("unfinished", (), "likely")
    assert "network" in report.verdict


def test_records_that_were_reset_begin_anew_and_numbers_go_on() -> None:
    one, two = entry(seq=8, record=0), entry(seq=9, record=1, state="started", retired=False)
    report = _report(dump(one, two, groups=ALL3), dump(one, two, groups=ALL3), dump(groups=ALL3))
    assert (report.stuck[0].seq, report.ranks) == (8, (2,))


def test_a_batch_that_differs_in_one_of_its_sizes() -> None:
    """As an uneven all-gather of ranks that disagree about its parts."""

    def batch(last: int) -> RecorderDump:
        sizes: dict[str, Any] = {"state": "scheduled", "retired": False, "output_sizes": ((last,),)}
        parts = [
            entry("nccl:_broadcast_oop", 2, 1, state="scheduled"),
            entry("nccl:_broadcast_oop", 2, 2, **sizes),
        ]
        end = entry(
            "nccl:ALLGATHER_coalesced", 2, 3, state="started", input_sizes=(), output_sizes=()
        )
        return dump(entry(), *parts, end, groups=ALL3)

    report = _report(batch(4), batch(4), batch(5))
    assert (report.stuck[0].kind, report.ranks) == ("mismatch", (2,))


def test_a_rank_that_alone_did_not_complete_is_named() -> None:
    report = _three(_entered(), _entered(state="completed"), _entered(state="completed"))
    assert (report.stuck[0].kind, report.ranks) == ("unfinished", (0,))


def test_a_finished_job_has_no_stalled_operation() -> None:
    report = _three(*[_entered(state="completed")] * 3)
    assert (report.stuck, report.ranks, report.confidence) == ((), (), "")
    assert report.verdict.startswith("No operation is stalled")


def test_ranks_that_wait_for_each_other_in_a_circle() -> None:
    """Rank 0 enters group 1 and then group 2, rank 1 the other way round."""
    groups = {"0": (0, 1), "1": (0, 1), "2": (0, 1)}
    one = entry(process_group=("1", "d1"), state="started")
    two = entry(process_group=("2", "d2"), state="started")
    report = _report(dump(one, groups=groups), dump(two, groups=groups))
    assert report.circle
    assert "circle" in report.verdict
    assert {stuck.ranks for stuck in report.stuck} == {(0,), (1,)}


def test_a_send_without_a_receive_names_the_receiver() -> None:
    send = entry("nccl:send 0->2", 1, 1, p2p=True, state="started", retired=False)
    report = _report(
        dump(entry(), send, groups=ALL3), dump(entry(), groups=ALL3), dump(entry(), groups=ALL3)
    )
    assert (report.stuck[0].kind, report.stuck[0].op, report.ranks) == ("absent", "send", (2,))


def test_a_send_and_its_receive_that_do_not_end() -> None:
    send = entry("nccl:send 0->2", 1, 1, p2p=True, state="started", retired=False)
    receive = entry("nccl:recv 2<-0", 1, 1, p2p=True, state="started", retired=False)
    report = _report(
        dump(entry(), send, groups=ALL3), dump(entry(), groups=ALL3),
        dump(entry(), receive, groups=ALL3),
    )  # fmt: skip
    assert (report.stuck[0].kind, report.stuck[0].waiting) == ("unfinished", (0, 2))
    assert "both have entered it" in report.verdict


def test_group_ranks_are_not_global_ranks() -> None:
    groups = {"0": (0, 1, 2, 3), "1": (3, 1)}
    send = entry(
        "nccl:send 0->1", 1, 0, p2p=True, state="started", process_group=("1", "d1"), retired=False
    )
    report = _report(*(dump(*([send] if rank == 3 else []), groups=groups) for rank in range(4)))
    assert (report.stuck[0].waiting, report.ranks) == ((3,), (1,))


def test_a_batch_is_one_operation_with_the_state_of_its_end() -> None:
    parts = [entry("nccl:_all_gather_base", 2, at, state="scheduled") for at in (1, 2)]
    ended = entry("nccl:coalesced", 2, 3, input_sizes=(), output_sizes=())
    waits = entry("nccl:coalesced", 2, 3, state="started", input_sizes=(), output_sizes=())
    one = dump(entry(), *parts, ended, groups=ALL3)
    assert _report(one, one, one).stuck == ()
    two = dump(entry(), *parts, waits, groups=ALL3)
    assert _report(two, two, two).stuck[0].op == "_all_gather_base + _all_gather_base"


def test_a_group_made_anew_under_its_name_counts_from_its_last_beginning() -> None:
    """As after an elastic restart in the process: the first life of rank 0 is over."""
    old = [entry(seq=seq, record=seq) for seq in (1, 2, 3)]
    new = [entry(seq=seq, record=4 + seq) for seq in (1, 2)]
    late = [entry(seq=1, record=0)]
    report = _report(dump(*old, *new, groups={"0": (0, 1)}), dump(*late, groups={"0": (0, 1)}))
    assert (report.stuck[0].seq, report.ranks) == (2, (1,))


def test_groups_of_one_name_with_other_members_are_others() -> None:
    """As `split_group` names them: each rank knows its own group "1" only."""
    left, right = {"0": (0, 1, 2, 3), "1": (0, 1)}, {"0": (0, 1, 2, 3), "1": (2, 3)}
    both = [entry(seq=seq, record=seq, process_group=("1", "d1")) for seq in (1, 2)]
    one = [entry(seq=1, record=1, process_group=("1", "d1"))]
    report = _report(
        dump(*both, groups=left), dump(*both, groups=left), dump(*one, groups=right),
        dump(*one, groups=right),
    )  # fmt: skip
    assert report.stuck == ()


def test_a_rank_without_a_dump_may_be_the_one() -> None:
    waits = dump(entry(seq=1), entry(seq=2, record=1, state="started"), groups=ALL3)
    report = analyse_dumps(read({0: waits, 1: waits}))
    assert (report.stuck[0].kind, report.ranks, report.missing) == ("no-dump", (2,), (2,))
    assert report.confidence == "likely"


def test_records_written_over_are_undecided() -> None:
    groups = {"0": (0, 1), "1": (0, 1)}
    other = entry(seq=90, record=90, process_group=("1", "d1"))
    waits = entry(seq=5, record=91, state="started", retired=False)
    report = _report(dump(other, waits, groups=groups), dump(other, groups=groups))
    assert (report.stuck[0].kind, report.confidence, report.wrapped) == (
        "undecided", "unsure", (0, 1),
    )  # fmt: skip


def test_a_rank_that_skipped_a_collective_and_votes_is_the_cause() -> None:
    """As in `outlast run`: the others wait in the step, it waits for them at the step's end."""
    vote: dict[str, Any] = {"process_group": ("control", "undefined"), "retired": False}
    groups = {"0": (0, 1, 2), "control": (0, 1, 2)}
    first = entry("gloo:all_reduce", 1, 0)
    waits = entry("gloo:all_reduce", 2, 1, retired=False)
    went_on = entry("gloo:all_reduce", 1, 1, **vote)
    report = _report(
        dump(first, waits, groups=groups), dump(first, went_on, groups=groups),
        dump(first, waits, groups=groups),
    )  # fmt: skip
    assert (report.ranks, report.stuck[0].seq, report.circle) == ((1,), 2, False)
    assert "The last that rank 1 entered is all_reduce 1 of group control (of Outlast)" in (
        report.verdict
    )


def test_ranks_without_any_entry_are_distinguished_from_ranks_behind() -> None:
    first = entry(seq=1, record=0)
    report = _report(dump(first, _entered(), groups=ALL3), dump(groups=ALL3), dump(groups=ALL3))
    assert "entered nothing of group 0 (default_pg), and so not all_reduce 1" in report.verdict
    dumps = {0: dump(first, _entered(), groups=ALL3), 1: dump(first, groups=ALL3)}
    assert "Rank 1 never entered all_reduce 2" in analyse_dumps(read(dumps), world=2).verdict
