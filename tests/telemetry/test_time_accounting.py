"""Time accounting: every nanosecond of a rank is in exactly one bucket."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.errors import CorruptionError, RunDirError
from outlast.events import (
    AnyEvent,
    AttemptRefused,
    GenerationClosed,
    GenerationOpened,
    Note,
    PhaseDone,
    PhaseKind,
    RunEnded,
    RunStarted,
)
from outlast.telemetry.history import time_buckets
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.history.time_buckets import BUCKETS, TimeAccount
from outlast.telemetry.time_accounting import BUCKET_OF_KIND, account

TIMES = st.integers(0, 60)
WORKERS = st.sampled_from(["w1-0", "w1-1", "w1-2", "w2-0"])
SEATS = st.integers(-1, 3)
SMALL = st.integers(0, 6)
KINDS = st.sampled_from([*get_args(PhaseKind), "strange"])
STARTED = st.builds(
    RunStarted,
    t_ns=TIMES,
    run=st.just("r"),
    term=SMALL,
    world=st.integers(1, 3),
    spares=st.just(0),
    script=st.just("s"),
    args=st.just(()),
)
PHASES = st.builds(
    PhaseDone,
    t_ns=TIMES,
    worker=WORKERS,
    seat=SEATS,
    generation=SMALL,
    n=SMALL,
    step=SMALL,
    kind=KINDS,
    t_begin_ns=TIMES,
    t_vote_ns=TIMES,
)
ATTEMPTS = st.builds(
    AttemptRefused,
    t_ns=TIMES,
    worker=WORKERS,
    seat=SEATS,
    generation=SMALL,
    n=SMALL,
    step=SMALL,
    kind=KINDS,
    t_begin_ns=TIMES,
    reason=st.sampled_from(["", "rehearsal"]),
)
CLOSED = st.builds(GenerationClosed, t_ns=TIMES, incident=SMALL, generation=SMALL)
OPENED = st.builds(GenerationOpened, t_ns=TIMES, incident=SMALL, generation=SMALL, n=SMALL)
ENDED = st.builds(
    RunEnded, t_ns=TIMES, outcome=st.just("done"), exit_code=st.just(0), n=SMALL, step=SMALL
)
SOUP = st.lists(STARTED | PHASES | PHASES | ATTEMPTS | CLOSED | OPENED | ENDED, max_size=30)


@settings(max_examples=400)
@given(first=STARTED, soup=SOUP)
def test_buckets_partition_the_time_for_arbitrary_events(
    first: RunStarted, soup: list[AnyEvent]
) -> None:
    for running in (False, True):
        check_partition(account(RunHistory.of([*soup, first]), running=running))


def check_partition(result: TimeAccount) -> None:
    for lane in result.lanes:
        covered = [t for span in lane.spans for t in range(span.begin_ns, span.end_ns)]
        assert covered == list(range(result.begin_ns, result.end_ns))
    assert sum(result.totals_ns.values()) == result.wall_ns * len(result.lanes)
    assert 0 <= result.goodput <= result.ettr <= 1


@settings(max_examples=200)
@given(
    phases=st.lists(PHASES, max_size=12),
    attempts=st.lists(ATTEMPTS, max_size=6),
    edges=st.lists(TIMES, max_size=6, unique=True),
)
def test_precedence_tick_by_tick(
    phases: list[PhaseDone], attempts: list[AttemptRefused], edges: list[int]
) -> None:
    """Refused attempts, then recoveries, then what was done: as one would say it of each tick."""
    started = RunStarted(t_ns=0, run="r", term=1, world=2, spares=0, script="s", args=())
    ended = RunEnded(t_ns=60, outcome="done", exit_code=0, n=0, step=0)
    marks: list[AnyEvent] = []
    for index, t_ns in enumerate(sorted(edges)):
        marks.append(
            GenerationOpened(t_ns=t_ns, incident=1, generation=1, n=9)
            if index % 2
            else GenerationClosed(t_ns=t_ns, incident=1, generation=1)
        )
    result = account(RunHistory.of([started, *phases, *attempts, *marks, ended]))
    edges = sorted(edges) + ([60] if len(edges) % 2 else [])
    recovering = {t for a, b in zip(edges[::2], edges[1::2], strict=True) for t in range(a, b)}
    for lane in result.lanes:
        bucket = {t: span.bucket for span in lane.spans for t in range(*span[:2])}
        of_seat = [one for one in attempts if one.seat == lane.seat]
        refused = _ticks([one for one in of_seat if one.reason != "rehearsal"])
        done = _ticks([one for one in phases if one.seat == lane.seat])
        for t in _ticks([one for one in of_seat if one.reason == "rehearsal"]):
            done.setdefault(t, set()).add("start")
        for t in range(60):
            if t in refused:
                assert bucket[t] == "lost"
            elif t in recovering:
                assert bucket[t] == "recovery"
            elif t in done:
                assert bucket[t] in done[t]
            else:
                assert bucket[t] in ("start", "script", "lost", "recovery", "stop")


def _ticks(acts: list[PhaseDone] | list[AttemptRefused]) -> dict[int, set[str]]:
    name: dict[str, str] = {**BUCKET_OF_KIND, "strange": "script"}
    ticks: dict[int, set[str]] = {}
    for act in acts:
        for t in range(act.t_begin_ns, act.t_ns):
            ticks.setdefault(t, set()).add(name[act.kind])
    return ticks


def ms(result: TimeAccount) -> dict[str, float]:
    return {name: ns / 1e6 for name, ns in result.totals_ns.items() if ns}


def spans_ms(result: TimeAccount, seat: int) -> list[tuple[str, float]]:
    return [(span.bucket, (span.end_ns - span.begin_ns) / 1e6) for span in result.lanes[seat].spans]


def test_an_undisturbed_run(tmp_path: Path) -> None:
    SyntheticRun(tmp_path, world=2).start(ms=500).phase(ms=100).steps(1, ms=80, script_ms=3).phase(
        "eval", ms=40
    ).phase("checkpoint", ms=30).end()
    result = account(read_history(tmp_path))
    assert spans_ms(result, 1) == [
        ("start", 500),
        ("step", 100),
        ("script", 3),
        ("step", 80),
        ("eval", 40),
        ("checkpoint", 30),
        ("stop", 55),
    ]
    assert ms(result) == {
        "start": 1000,
        "step": 360,
        "script": 6,
        "eval": 80,
        "checkpoint": 60,
        "stop": 110,
    }
    assert result.goodput == pytest.approx(180 / 808)
    assert result.ettr == pytest.approx((180 + 40 + 3) / 808)


def test_a_kill_costs_an_attempt_and_a_recovery(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=3).start(ms=500).phase(ms=100)
    story.broken(1, story.fault("killed", 1, signal=9), ms=20)
    story.decide((1,)).heal((1,), join_ms=400, copy_ms=90).phase(ms=100).end()
    result = account(read_history(tmp_path))
    # Close 1 ms after the kill, two answers of 3 ms, decision 2, join 400, connect 10 + 90.
    survivor = [("lost", 25), ("recovery", 504), ("step", 100), ("stop", 55)]
    joiner = [("lost", 21), ("recovery", 508), ("step", 100), ("stop", 55)]
    assert spans_ms(result, 0)[2:] == survivor
    assert spans_ms(result, 1)[2:] == joiner


def test_a_commit_that_spans_the_recovery_is_cut_at_its_edges(tmp_path: Path) -> None:
    """A survivor that applies on `commit`: its phase began before the close, ended after the
    opening; the time between is the recovery's."""
    story = SyntheticRun(tmp_path, world=1, spares=0).start(ms=100)
    begin_ns = story.t_ns
    story.wait(30)
    story.incident = 1
    story.notice(story.fault("transport", 0))
    story.closed()
    story.wait(200)
    story.say(GenerationOpened(t_ns=story.t_ns, incident=1, generation=2, n=1))
    story.wait(10)
    story.done(0, n=1, step=1, begin_ns=begin_ns)
    story.n = story.step = 1
    story.end()
    spans = spans_ms(account(read_history(tmp_path)), 0)
    assert spans[:4] == [("start", 100), ("step", 30), ("recovery", 200), ("step", 10)]


def test_steps_rolled_back_are_lost(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start(ms=500)
    for _ in range(4):
        story.phase(ms=100)
    story.broken(0, story.fault("killed", 0, signal=9), ms=0)
    story.decide((0, 1), rung="restart", n=1, step=1).heal((0, 1))
    story.wait(50)  # the scripts' own set-up after the opening
    story.phase(ms=100).phase(ms=100).end()
    result = account(read_history(tmp_path))
    assert spans_ms(result, 0)[1][0] == "step"
    assert spans_ms(result, 0)[1][1] == 100
    assert ms(result)["step"] == 2 * 3 * 100
    assert spans_ms(result, 0)[2] == ("lost", 301)  # three steps, and 1 ms until the notice
    assert "script" not in [name for name, _ in spans_ms(result, 0)[3:5]]


def test_two_terms_and_the_gap_between_them(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start(ms=500).phase(ms=100).phase(ms=100)
    story.wait(30)
    story.close()  # the launcher is killed: no RunEnded
    story.wait(5000)
    story.start(resumed_n=1, resumed_step=1, ms=400).phase(ms=100).end()
    result = account(read_history(tmp_path))
    assert spans_ms(result, 1) == [
        ("start", 500),
        ("step", 100),
        ("lost", 100),
        ("down", 5030),
        ("start", 400),
        ("step", 100),
        ("stop", 55),
    ]


def test_a_run_that_died_in_a_recovery(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start(ms=500).phase(ms=100)
    story.broken(0, story.fault("killed", 0, signal=9), ms=20).decide((0,))
    story.wait(70)
    story.closed()
    story.close()
    assert spans_ms(account(read_history(tmp_path)), 1) == [
        ("start", 500),
        ("step", 100),
        ("lost", 25),
        ("recovery", 71),
    ]


def test_a_living_run_counts_the_open_attempt_as_lost_until_it_commits(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=1, spares=0).start(ms=500).phase(ms=100)
    story.wait(40)
    story.closed()
    story.close()
    assert spans_ms(account(read_history(tmp_path)), 0)[-1] == ("lost", 40)


def test_a_rehearsal_is_part_of_the_start(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=1, spares=0).start(ms=500)
    begin_ns = story.t_ns
    story.write(
        "w1-0",
        AttemptRefused(
            t_ns=story.wait(60),
            worker="w1-0",
            seat=0,
            generation=1,
            n=1,
            step=1,
            kind="step",
            t_begin_ns=begin_ns,
            reason="rehearsal",
        ),
    )
    story.phase(ms=100).end()
    assert spans_ms(account(read_history(tmp_path)), 0)[:2] == [("start", 560), ("step", 100)]


def test_events_without_a_start(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path)
    story.say(GenerationClosed(t_ns=1, incident=1, generation=1))
    story.close()
    with pytest.raises(RunDirError, match="no start of a run"):
        account(read_history(tmp_path))


def test_sums_that_differ_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SyntheticRun(tmp_path).start().steps(2).end()
    history = read_history(tmp_path)
    merge = time_buckets.merge
    monkeypatch.setattr(
        time_buckets,
        "merge",
        lambda claims, lane: merge(claims.chosen(slice(1, None)), lane[1:]),
    )
    with pytest.raises(CorruptionError, match="accounted"):
        account(history)


def test_every_bucket_has_a_meaning_in_the_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    table = text.partition("## Time by bucket")[2].partition("\nRehearsals")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    named = {name.strip() for row in rows for name in row.split(",")}
    assert named - {"bucket", "*what is left:*"} == set(BUCKETS)


def test_every_kind_of_phase_has_a_bucket() -> None:
    assert set(BUCKET_OF_KIND) == set(get_args(PhaseKind))
    assert set(BUCKET_OF_KIND.values()) <= set(BUCKETS)


def test_the_workers_kinds_are_the_vocabularys() -> None:
    pytest.importorskip("torch", reason="the worker needs torch")
    from outlast.worker.phases.phase_runner import Kind

    assert set(get_args(Kind)) == set(get_args(PhaseKind))


def test_a_note_before_the_next_start_does_not_date_the_death(tmp_path: Path) -> None:
    """A launcher that resumes says which checkpoints it passed over: nobody lived until then."""
    story = SyntheticRun(tmp_path, world=2).start(ms=500).phase(ms=100)
    story.wait(30_000)
    story.say(Note(t_ns=story.t_ns, worker="", seat=-1, text="checkpoint passed over"))
    story.close()
    story.wait(1)
    story.start(resumed_n=1, resumed_step=1, ms=400).phase(ms=100).end()
    totals = ms(account(read_history(tmp_path)))
    assert totals["down"] == 2 * 30_001 and "lost" not in totals


def test_the_step_that_a_living_run_is_in_is_not_lost(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start(ms=500).steps(3, ms=100, script_ms=0)
    story.wait(40)
    story.done(0, n=4, step=4, begin_ns=story.t_ns - 40_000_000)  # rank 1 is still in it
    story.close()
    running = account(read_history(tmp_path), running=True)
    assert ms(running) == {"start": 1000, "step": 600}
    assert ms(account(read_history(tmp_path)))["lost"] == 40  # dead, it would be


def test_a_living_run_in_a_recovery_counts_it(tmp_path: Path) -> None:
    story = SyntheticRun(tmp_path, world=2).start(ms=500).phase(ms=100)
    story.broken(0, story.fault("killed", 0, signal=9), ms=20).decide((0,))
    story.wait(70)
    story.say(Note(t_ns=story.t_ns, worker="w1-1", seat=1, text="still here", level="info"))
    story.close()
    assert spans_ms(account(read_history(tmp_path), running=True), 1)[-1] == ("recovery", 71)
