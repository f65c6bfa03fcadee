"""An account that is extended by new phases is that of the whole history."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun
from tests.telemetry.test_time_accounting import KINDS, SOUP, WORKERS

from outlast.events import (
    AnyEvent,
    Decided,
    GenerationClosed,
    GenerationOpened,
    PhaseDone,
    PhaseKind,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.history import growing_account
from outlast.telemetry.history.growing_account import GrowingAccount
from outlast.telemetry.history.run_history import RunHistory
from outlast.telemetry.history.time_buckets import TimeAccount
from outlast.telemetry.time_accounting import account


def phase(
    seat: int,
    begin_ns: int,
    end_ns: int,
    worker: str = "w1-0",
    kind: PhaseKind = "step",
    n: int = 1,
) -> PhaseDone:
    return PhaseDone(
        t_ns=end_ns,
        worker=worker,
        seat=seat,
        generation=9,
        n=n,
        step=1,
        kind=kind,
        t_begin_ns=begin_ns,
        t_vote_ns=end_ns,
    )


def check(growing: GrowingAccount, history: RunHistory, *, running: bool = True) -> TimeAccount:
    """Compare the totals, and the sums of each row's columns, with the whole account."""
    drawn, whole = growing.read(history, running=running), account(history, running=running)
    own = (drawn.totals.begin_ns, drawn.totals.end_ns, drawn.totals.seats, drawn.totals.totals_ns)
    assert own == (whole.begin_ns, whole.end_ns, whole.seats, whole.totals_ns)
    of_all = growing_account.drawn_account(whole)
    by_row = of_all.columns.filled_ns.sum(axis=1)
    assert (drawn.columns.filled_ns.sum(axis=1) == by_row).all()
    return whole


NEXT = st.tuples(st.integers(0, 1), st.integers(-4, 5), st.integers(1, 9), WORKERS, KINDS)


@settings(max_examples=400)
@given(soup=SOUP, later=st.lists(st.lists(NEXT, max_size=8), min_size=2, max_size=5))
def test_phases_in_order_late_and_overlapping(
    soup: list[AnyEvent], later: list[list[tuple[int, int, int, str, PhaseKind]]]
) -> None:
    growing, ends = GrowingAccount(), [70, 70]
    started = RunStarted(t_ns=0, run="r", term=1, world=2, spares=0, script="s", args=())
    opened = GenerationOpened(t_ns=65, incident=0, generation=9, n=0)
    events = [*(e for e in soup if not isinstance(e, RunStarted | RunEnded)), started, opened]
    for chunk in later:
        for seat, gap, lasted, worker, kind in chunk:
            begin_ns = ends[seat] + gap
            ends[seat] = begin_ns + lasted
            events.append(phase(seat, begin_ns, ends[seat], worker, kind, n=len(events)))
        check(growing, RunHistory.of(events))


def test_a_live_run_is_extended_and_not_divided_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SyntheticRun(tmp_path, world=4).start().steps(5).killed(2).steps(5)
    growing, history, reader = GrowingAccount(), RunHistory(), EventReader(tmp_path)
    wholes = [0]

    def counted(history: RunHistory, *, running: bool) -> TimeAccount:
        wholes[0] += 1
        return account(history, running=running)

    monkeypatch.setattr(growing_account, "account", counted)
    for _ in range(60):
        history.read(reader)
        check(growing, history)
        run.steps(40)
    assert wholes == [1]
    run.killed(1).steps(3)
    history.read(reader)
    check(growing, history)
    assert wholes == [2]
    run.end()
    history.read(reader)
    check(growing, history, running=False)
    assert wholes == [3]


def test_columns_are_at_the_same_times(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, world=2).start()
    growing, history, reader = GrowingAccount(), RunHistory(), EventReader(tmp_path)
    for _ in range(9):
        run.steps(50)
        history.read(reader)
        drawn = growing.read(history, running=True)
    whole = account(history, running=True)
    empty = growing_account.empty_columns(whole.begin_ns, drawn.columns.width_ns, 2)
    expected = empty.extended(whole.claims, whole.seat, whole.end_ns)
    assert (drawn.columns.filled_ns == expected.filled_ns).all()
    assert drawn.columns.spans() == expected.spans()


def test_a_live_run_without_a_rank_is_accounted_until_now() -> None:
    events: list[AnyEvent] = [
        RunStarted(t_ns=0, run="r", term=1, world=2, spares=0, script="s", args=()),
        GenerationOpened(t_ns=1, incident=0, generation=1, n=0),
        phase(0, 1, 10),
        phase(1, 1, 10),
        GenerationClosed(t_ns=11, incident=1, generation=1),
        Decided(
            t_ns=12,
            incident=1,
            generation=2,
            verdict="redo",
            rung="shrink",
            n=1,
            step=1,
            replaced=(),
            reason="no spare",
            absent=(1,),
        ),
        GenerationOpened(t_ns=13, incident=1, generation=2, n=1),
        phase(0, 13, 20),
    ]
    growing = GrowingAccount()
    for end_ns in (30, 40, 50):
        check(growing, RunHistory.of(events))
        events.append(phase(0, end_ns - 10, end_ns))
    whole = check(growing, RunHistory.of(events))
    assert whole.lanes[1].spans[-1] == (13, 50, "absent")
