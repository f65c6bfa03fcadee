"""Hosts that leave a run for maintenance, once their ranks have moved."""

from __future__ import annotations

from typing import Any

import pytest
from tests.controller.test_notices import give, notice
from tests.controller.test_scheduler_drains import NodesDriver

from outlast import events
from outlast.controller.inputs import Send, StopRequested
from outlast.transport import messages


def leave(run: NodesDriver, *hosts: str, code: str = "1") -> None:
    """Ask hosts to leave, in place of all that were asked before."""
    give(run, *(notice(host, check="roll", code=code) for host in hosts), check="roll")


def released(run: NodesDriver) -> list[str]:
    """The agents whose launchers were told to end, in order."""
    return [
        one.agent
        for one in run.history
        if isinstance(one, Send) and isinstance(one.body, messages.RunOutcome)
    ]


def reap(run: NodesDriver, agent: str) -> None:
    for worker in list(run.state.members.crew(agent)):
        run.lose(worker.name, -1, kind="requested", detail="killed")


def spares(run: NodesDriver, agent: str) -> list[str]:
    return [each.name for each in run.state.members.crew(agent) if each.seat < 0]


@pytest.fixture
def run() -> NodesDriver:
    """Ranks on n1 and n2, a spare on n3."""
    return NodesDriver().start()


def test_a_host_without_ranks_leaves_when_its_spares_are_dead(run: NodesDriver) -> None:
    (spare,) = spares(run, "n3")
    leave(run, "n3")
    run.step()
    assert run.killed() == {spare} and released(run) == []
    reap(run, "n3")
    assert released(run) == ["n3"]
    assert [one.host for one in run.emitted(events.NodeReleased, history=True)] == ["n3"]
    assert run.state.members.agents["n3"].lapsed and run.state.mode == "open"
    assert not [one for one in run.emitted(events.Note, history=True) if spare in one.text]


def test_ranks_move_first_and_have_made_a_phase(run: NodesDriver) -> None:
    leave(run, "n2")
    run.step()
    assert released(run) == [] and run.leaving() == set()
    run.come_to_boundary()
    n, generation = run.state.progress.n + 1, run.state.generation
    (moved,) = run.leaving()
    run.lose(moved, n, slots={f"before:{n}": b"own"}, kind="requested", detail="killed")
    for worker in run.seats():
        if worker and run.state.generation == generation:
            run.status(worker, n, "running")
    run.heal(n)
    assert run.state.mode == "open" and released(run) == [], "no phase is complete there yet"
    run.step()
    reap(run, "n2")
    assert released(run) == ["n2"]
    assert run.emitted(events.Decided, history=True)[-1].rung == "migrate"


def test_without_a_place_for_its_ranks_a_host_stays(run: NodesDriver) -> None:
    run.lose(*spares(run, "n3"), -1, kind="killed", detail="killed")
    leave(run, "n1")
    run.step()
    run.come_to_boundary()
    assert released(run) == [] and not run.leaving()
    (note,) = [one for one in run.emitted(events.Note, history=True) if "not moved yet" in one.text]
    assert note.text.startswith("roll: 1: ")


def test_no_worker_starts_and_no_rank_moves_to_a_closed_host(run: NodesDriver) -> None:
    leave(run, "n3")
    run.step()
    reap(run, "n3")
    assert {one.agent for one in run.state.members.workers.values()} == {"n1", "n2"}
    assert len(spares(run, "n1") + spares(run, "n2")) == 1, "another one is started there"


def test_a_failure_meanwhile_opens_the_host_again(run: NodesDriver) -> None:
    leave(run, "n3")
    run.step()
    assert run.state.releases.closed == ("n3",)
    n = run.state.progress.n + 1
    run.lose(run.seats()[0], n, slots={f"before:{n}": b"own"}, kind="killed", detail="SIGKILL")
    assert run.state.releases.closed == () and released(run) == []
    reap(run, "n3")
    assert released(run) == [], "the generation is closed"
    run.tick(0.1)
    assert any(
        isinstance(one, Send) and isinstance(one.body, messages.Spawn) for one in run.history
    )


def test_a_request_that_is_taken_back_opens_the_host_again(run: NodesDriver) -> None:
    leave(run, "n3")
    run.step()
    leave(run)
    assert run.state.releases.closed == ()
    reap(run, "n3")
    run.step()
    assert released(run) == [] and spares(run, "n3") != []


def test_a_host_that_has_come_back_is_not_asked_again(run: NodesDriver) -> None:
    leave(run, "n3")
    run.step()
    reap(run, "n3")
    body = messages.AgentHello(host="n3", address="", capacity=2, lease_s=1e6)
    run.say("", body, agent="n3", incarnation=2)
    run.say("", messages.Renew(), agent="n3", incarnation=2)
    run.step()
    assert released(run) == ["n3"]
    leave(run, "n3", code="2")
    run.step()
    assert run.state.releases.closed == ("n3",) or spares(run, "n3") == []


def test_an_agent_that_missed_its_end_gets_it_again(run: NodesDriver) -> None:
    """Its connection broke; it is the same process."""
    leave(run, "n3")
    run.step()
    reap(run, "n3")
    run.meet("n3")
    run.step()
    assert released(run) == ["n3", "n3"]


def test_hosts_that_all_are_to_leave_do_not_leave_together(run: NodesDriver) -> None:
    leave(run, "n1", "n2", "n3")
    run.step()
    run.come_to_boundary()
    for agent in ("n1", "n2", "n3"):
        reap(run, agent) if not any(w.seat >= 0 for w in run.state.members.crew(agent)) else None
    run.step()
    assert released(run) == ["n3"] and all(run.seats())


def test_a_run_that_ends_releases_nobody(run: NodesDriver) -> None:
    run.feed(StopRequested(t_ns=run.now_ns, reason="asked"))
    leave(run, "n3")
    run.step()
    assert run.killed() == set() and released(run) == []


@pytest.mark.parametrize("words", [{"host": "elsewhere"}, {"check": "operator"}])
def test_other_notices_release_no_host(run: NodesDriver, words: dict[str, Any]) -> None:
    fields = {"host": "n3", "check": "roll", **words}
    give(run, notice(**fields), check=fields["check"])
    run.step()
    assert released(run) == [] and run.killed() == set()
