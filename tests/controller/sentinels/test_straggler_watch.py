"""Findings about slow ranks, and their moves, in the controller."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller import planned_migration
from outlast.controller.inputs import FindingKey, RankMigrated
from outlast.controller.recovery.recovery_policy import DEFAULT, plain_rules
from outlast.transport import messages
from outlast.transport.worker_page import OwnTimeRecord

KEY = FindingKey("h", "straggler", "other", "slow", "rank 1")


class Run(ControllerDriver):
    """A run of one agent, whose ranks report their own times."""

    def __init__(self, world: int = 4, spares: int = 1, **limits: Any) -> None:
        super().__init__(world, spares, **{"straggler_wait_s": 3, **limits})
        self.sums: dict[str, tuple[int, float, float]] = {}
        self.at = 0

    def steps(self, count: int, *, rank: int = 1, factor: float = 1.0, own_s: float = 0.1) -> None:
        """Make steps in which a rank takes `factor` times as long, and report each."""
        for _ in range(count):
            self.at += 1
            longest_s, own_times, beats = max(1.0, factor) * own_s + 0.01, {}, {}
            for seat, name in enumerate(self.seats()):
                steps, step_s, mine_s = self.sums.get(name, (0, 0.0, 0.0))
                mine_s += own_s * (factor if seat == rank else 1)
                self.sums[name] = steps + 1, step_s + longest_s, mine_s
                record = OwnTimeRecord(
                    generation=self.state.generation,
                    step=self.at,
                    steps=steps + 1,
                    step_us=int(1e6 * (step_s + longest_s)),
                    own_us=int(1e6 * mine_s),
                )
                own_times[name] = (record,)
                beats[name] = (self.at, self.at, "running", 0.0)
            self.now_ns += int(longest_s * 1e9)
            self.say("", messages.Renew(beats=beats, own_times=own_times))
            if self.state.mode != "open":
                return

    def depart(self, rank: int = 1) -> None:
        """Let the rank answer at its boundary, and the spare take its place."""
        old, generation = self.seats()[rank], self.state.generation
        if self.state.mode == "open":
            self.status(old, self.at, "idle")
        assert old in self.killed()
        self.lose(old, self.at, slots={f"before:{self.at}": b"own"}, kind="requested", detail="")
        for worker in tuple(self.seats()):
            if worker and self.state.generation == generation:
                self.status(worker, self.at, "running")
        self.heal(self.at)
        assert self.state.mode == "open" and self.state.generation == generation + 1

    def findings(self) -> list[events.Warned]:
        return self.emitted(events.Warned, history=True)

    def notes(self, word: str) -> list[str]:
        found = self.emitted(events.Note, history=True)
        return [note.text for note in found if word in note.text]


def run(**limits: Any) -> Run:
    made = Run(**limits)
    made.begin()
    made.open()
    return made


def test_a_slow_rank_is_warned_of_and_moves_at_the_price() -> None:
    one = run()
    one.steps(30)
    assert one.findings() == []
    one.steps(20, factor=1.5)
    first, *_ = one.findings()
    assert {each.severity for each in one.findings()} == {"warn"}
    assert (first.severity, first.finding) == ("warn", "straggler: slow on rank 1")
    assert (first.worker, first.host) == (one.seats()[1], "h")
    assert "1.50 times the 0.1 s of its 3 peer(s), since step 31" in first.detail
    assert one.state.findings.departing == {}, "a move does not pay yet"
    one.steps(60, factor=1.5)
    due = next(one for one in one.findings() if one.severity == "drain")
    assert 3 <= due.lost_s < 3.2
    assert one.seats()[1] in one.state.findings.departing
    one.depart()
    (decided,) = one.emitted(events.Decided, history=True)
    assert decided.rung == "migrate" and decided.rule.startswith("policy default, straggler")
    (noticed,) = one.emitted(events.Noticed, history=True)
    assert (noticed.how, noticed.fault.kind) == ("straggler", "requested")
    one.steps(60)
    assert one.findings()[-1].severity == "healthy" and one.state.findings.warned == {}
    (helped,) = one.notes("has helped")
    assert "1.00 times as long as its peers now, 1.50 times before" in helped


def test_a_rank_whose_work_is_larger_moves_once() -> None:
    one = run(spares=2)
    one.steps(30)
    one.steps(90, factor=1.5)
    one.depart()
    one.steps(200, factor=1.5)
    (note,) = one.notes("its work is larger")
    assert "1.50 times before the move and 1.50 times" in note
    assert one.state.mode == "open" and one.state.findings.departing == {}
    assert one.findings()[-1].severity == "warn"
    assert "its work is larger" in one.findings()[-1].detail
    assert len(one.emitted(events.Decided, history=True)) == 1


def test_without_a_spare_a_note_says_why_it_stays() -> None:
    one = run(spares=0)
    one.steps(30)
    one.steps(120, factor=1.5)
    assert one.state.mode == "open" and one.state.findings.departing == {}
    (why,) = one.notes("not moved yet")
    assert "straggler: slow on rank 1" in why and "no warm spare" in why


def test_a_policy_without_migrate_moves_no_slow_rank() -> None:
    one = Run()
    rules = {"straggler": plain_rules("retry", "replace", "stop")}
    one.state.recovery = planned_migration.replace(DEFAULT, classes=rules)
    one.begin()
    one.open()
    one.steps(30)
    one.steps(120, factor=1.5)
    (why,) = one.notes("not moved yet")
    assert "has no rung migrate for stragglers" in why and one.state.findings.departing == {}


def test_a_slow_rank_that_recovers_is_forgotten() -> None:
    one = run()
    one.steps(30)
    one.steps(25, factor=1.5)
    one.steps(60)
    assert [each.severity for each in one.findings()][-1] == "healthy"
    assert one.findings()[-1].lost_s >= 1.2
    one.steps(25, factor=1.5)
    assert one.findings()[-1].severity == "warn", "its loss begins anew"
    assert one.state.findings.warned.keys() == {KEY}


def test_the_loss_survives_a_failure_of_another_rank() -> None:
    one = run(straggler_wait_s=4)
    one.steps(30)
    one.steps(60, factor=1.5)
    before = one.findings()[-1].lost_s
    lost, generation = one.seats()[3], one.state.generation
    one.lose(lost, one.at, slots={f"before:{one.at}": b"own"}, kind="killed", detail="")
    for worker in tuple(one.seats()):
        if worker and one.state.generation == generation:
            one.status(worker, one.at, "running")
    one.heal(one.at)
    assert KEY in one.state.findings.warned, "not compared for long enough"
    one.steps(30, factor=1.5)
    assert one.state.findings.warned[KEY].lost_s > before + 1


def test_a_later_term_does_not_move_it_again() -> None:
    later = Run(spares=1)
    moved = RankMigrated(worker="w0-1", finding=KEY, t_ns=1)
    later.begin((moved,))
    later.open()
    later.steps(200, factor=1.5)
    assert later.notes("its work is larger") and later.state.findings.departing == {}


def test_slow_collectives_are_reported_once_they_cost_as_much_as_a_move() -> None:
    one = run()
    one.steps(40)

    def slower(count: int) -> None:
        for _ in range(count):
            for name, (steps, step_s, mine_s) in one.sums.items():
                one.sums[name] = steps, step_s + 0.1, mine_s
            one.steps(1)

    slower(20)
    assert one.findings() == []
    slower(40)
    found, *more = one.findings()
    assert len(more) < 4
    assert (found.finding, found.host, found.worker) == ("straggler: slow collectives", "", "")
    assert "no rank is to blame" in found.detail and found.lost_s >= 3
    assert one.state.findings.warned == {}
    one.steps(60)
    assert one.findings()[-1].severity == "healthy"


def test_uneven_work_is_noted_once() -> None:
    one = run(straggler_wait_s=0.5)
    for step in range(160):
        one.steps(1, rank=step % 4, factor=1.8)
    (note,) = one.notes("their work is uneven")
    assert "no machine is slow" in note and one.findings() == []


def test_reports_of_others_and_of_the_past_are_left_out() -> None:
    one = run()
    one.steps(30)
    watch, rows = one.state.stragglers, one.state.stragglers.rows
    record = OwnTimeRecord(one.state.generation, one.at + 1, 1, 1, 1, 1)
    strange = {
        "w9-9": (record,),
        one.seats()[0]: (
            record._replace(generation=99),
            record._replace(step=1),
            record._replace(step=-5),
        ),
    }
    one.say("", messages.Renew(own_times=strange))
    assert one.state.stragglers.rows == rows and one.state.stragglers.pending == watch.pending == {}


def test_a_rank_that_never_reports_fills_no_memory() -> None:
    one = Run(world=2)
    one.begin()
    one.open()
    name = one.seats()[0]
    for first in range(1, 5_000, 50):
        records = tuple(
            OwnTimeRecord(one.state.generation, step, step, step, step, 0)
            for step in range(first, first + 50)
        )
        one.say("", messages.Renew(own_times={name: records}))
    assert 100 < len(one.state.stragglers.pending) <= 257


@pytest.mark.parametrize("steps", [0, -3])
def test_a_worker_whose_sums_go_back_is_not_compared(steps: int) -> None:
    one = run()
    one.steps(20)
    name = one.seats()[2]
    count, step_s, mine_s = one.sums[name]
    one.sums[name] = count - 1 + steps, step_s, mine_s
    one.steps(1)
    assert one.state.stragglers.rows == 19, "its row is left out"
