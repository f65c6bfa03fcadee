"""Verdicts on ranks of several hosts, whose clocks are far apart."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from outlast.config import Limits
from outlast.controller.controller_state import ControllerState
from outlast.controller.member_tables import WorkerRecord
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import initial
from outlast.launch.nodes.run_hang_watch import RunHangWatch
from outlast.transport import messages
from outlast.transport.worker_page import PhasePace, WorkerObservation

S = 1_000_000_000
AHEAD_NS = {"a": 500_000 * S, "b": -300_000 * S}  # of a host's clock before the controller's
PACES = {11: PhasePace(40, S // 10)}


class Run:
    """Two hosts with a rank each, in an open generation, and a spare on a third one."""

    def __init__(self) -> None:
        self.state: ControllerState = initial(2, 1, Limits(hang_floor_s=8), SavePolicy())
        self.state.clock.mode = "open"
        for name, agent, seat in (("w0", "a", 0), ("w1", "b", 1), ("w2", "c", -1)):
            worker = WorkerRecord(name=name, agent=agent, seat=seat, since_ns=0)
            self.state.members.workers[name] = worker
        self.sent: list[tuple[str, messages.HangFound]] = []
        self.watch = RunHangWatch(
            self.state.limits,
            lambda: self.state,
            lambda agent, body: self.sent.append((agent, body)),
            lambda: 77 * S,
        )

    def report(self, agent: str, at_s: float, moved_s: float, **changes: Any) -> None:
        """Let an agent report its rank, which moved last at `moved_s` of the controller's clock."""
        ahead_ns, seat = AHEAD_NS[agent], "ab".index(agent)
        look = WorkerObservation(
            worker=f"w{seat}",
            seat=seat,
            n=40,
            state="running",
            collectives=17,
            t_ns=int(moved_s * S) + ahead_ns,
            waits=True,
            key=11,
            paces=PACES,
            letter="S",
        )
        now_ns = int(at_s * S)
        body = messages.RanksObserved(now_ns=now_ns + ahead_ns, ranks=(replace(look, **changes),))
        self.watch.observed(agent, body, now_ns)

    def report_both(self, at_s: float, **of_b: Any) -> None:
        self.report("a", at_s, 100)
        self.report("b", at_s, 100, **of_b)


@pytest.mark.parametrize(
    "hung", [{"collectives": 16}, {"waits": False}], ids=["behind", "out of collectives"]
)
def test_the_rank_that_other_hosts_wait_for_is_suspected_by_its_own_agent(
    hung: dict[str, Any],
) -> None:
    run = Run()
    for at_s in (102, 104, 106):
        run.report_both(at_s, **hung)
    assert run.sent == []
    run.report_both(110, **hung)
    (first, to_a), (second, to_b) = run.sent
    assert (first, second) == ("a", "b") and to_a.folder == to_b.folder
    assert (to_b.worker, to_b.fault.kind, to_b.fault.t_ns) == ("w1", "hung", 67 * S)
    assert (to_a.reports, to_b.reports) == (False, True)
    assert to_b.moved_ns == 100 * S + AHEAD_NS["b"]


def test_ranks_that_all_wait_at_one_place_are_retried_once() -> None:
    run = Run()
    for at_s in range(102, 120, 2):
        run.report_both(at_s)
    assert [(agent, body.worker, body.reports) for agent, body in run.sent] == [
        ("a", "", True),
        ("b", "", False),
    ]
    assert run.sent[0][1].fault.kind == "transport"


def test_no_rank_is_judged_while_another_host_makes_progress_or_is_away() -> None:
    run = Run()
    for at_s in range(102, 200, 2):
        run.report("a", at_s, 100)
    run.report("b", 200, 198)
    run.report("a", 206, 100)
    assert run.sent == []  # the newest report of b is old
    run.watch.observed("b", messages.RanksObserved(now_ns=0))
    run.report("a", 208, 100)
    assert run.sent == []


@pytest.mark.parametrize("mode", ["closing", "gathering", "connecting"])
def test_no_rank_is_judged_during_a_recovery(mode: Any) -> None:
    run = Run()
    run.state.clock.mode = mode
    for at_s in range(102, 130, 2):
        run.report_both(at_s, waits=False)
    assert run.sent == []


def test_a_rank_that_computes_is_given_time() -> None:
    run = Run()
    for at_s in range(102, 130, 2):
        run.report_both(at_s, waits=False, t_work_ns=at_s * S + AHEAD_NS["b"])
    assert run.sent == []
