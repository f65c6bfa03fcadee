"""Two hosts that do not reach each other, although both reach the controller."""

from __future__ import annotations

import pytest
from tests.controller.test_scheduler_drains import NodesDriver

from outlast import events
from outlast.controller.inputs import EndRun
from outlast.controller.recovery.network_cuts import HEAL_S
from outlast.transport import messages

TEXT = "do not reach each other, although both reach the controller"


class CutDriver(NodesDriver):
    """Three ranks on n1, n2 and n3, whose network is cut between hosts, and spare nodes."""

    def __init__(self, spares: int = 1) -> None:
        nodes = ("n1", "n2", "n3", *(f"n{4 + spare}" for spare in range(spares)))
        super().__init__(nodes, world=3, spares=spares)

    def meet(self, node: str, *_: str) -> None:
        """Register an agent with room for one worker."""
        self.say(
            "", messages.AgentHello(host=node, address="", capacity=1, lease_s=1e6), agent=node
        )
        self.say("", messages.Renew(), agent=node)

    def answer(self, *pairs: tuple[str, str]) -> None:
        """Let all ranks answer Close; those of these (host, silent host) have no answer."""
        generation, n = self.state.generation, self.state.progress.n
        n += self.state.progress.opened  # each open generation completes a phase
        named = [one for one, _ in pairs]
        hosts = {worker: self.state.members.workers[worker].agent for worker in self.seats()}
        for worker, host in sorted(hosts.items(), key=lambda each: each[1] not in named):
            silent = tuple(self.place_of(other) for one, other in pairs if one == host)
            fault = events.Fault(kind="transport", detail="Connection timed out")
            body = messages.Status(
                generation=generation,
                n=n,
                step=n,
                state="idle",
                fault=fault if silent else None,
                unreachable=silent,
            )
            self.say(worker, body)

    def place_of(self, host: str) -> str:
        """Return the address of a host, as its ranks' listeners have it."""
        return next(each.name for each in self.state.members.crew(host) if each.seat >= 0)

    def stand(self) -> None:
        """Let all ranks become ready for the generation that is decided."""
        for worker in self.seats():
            body = messages.WorkerReady(generation=self.state.generation, n=self.state.progress.n)
            self.say(worker, body)
        assert self.state.mode == "connecting"

    def reap(self) -> None:
        """Report the loss of all workers that were given up, with their own state."""
        n = self.state.progress.n
        for worker in sorted(self.leaving()):
            self.lose(worker, n, slots={f"before:{n}": b"own"}, kind="killed", detail="", signal=9)

    def rungs(self) -> list[str]:
        return [one.rung for one in self.emitted(events.Decided, history=True)]

    def texts(self) -> list[str]:
        return [one.text for one in self.emitted(events.Note, history=True) if TEXT in one.text]


def cut(spares: int = 1, *pairs: tuple[str, str]) -> CutDriver:
    """Return a run that was cut in an open generation, and is retried."""
    run = CutDriver(spares)
    run.start()
    run.answer(*(pairs or (("n2", "n3"),)))
    assert run.rungs() == ["retry"] and len(run.texts()) == 1
    assert not run.leaving()
    return run


def test_a_cut_that_heals_costs_a_retry() -> None:
    run = cut()
    noticed = run.emitted(events.Noticed, history=True)[0].fault
    assert noticed.detail.startswith("rank 1 on n2 had no answer from n3: Connection timed out")
    run.heal(run.state.progress.n)
    assert run.state.mode == "open" and run.places() == ["n1", "n2", "n3"]
    run.step()
    run.answer(("n3", "n2"))
    assert run.rungs() == ["retry", "retry"], "a phase is complete: the next cut is a new one"


def test_a_cut_that_stays_moves_the_ranks_of_the_later_host() -> None:
    run = cut()
    run.stand()
    run.answer(("n3", "n2"), ("n2", "n3"))
    assert run.leaving() == {run.seats()[2]} and run.state.mode == "closing"
    run.reap()
    run.heal(run.state.progress.n)
    assert run.rungs() == ["retry", "replace"] and run.places() == ["n1", "n2", "n4"]
    (replaced,) = [one for one in run.emitted(events.Decided, history=True) if one.replaced]
    assert f"n2 and n3 {TEXT}" in replaced.reason


def test_the_host_in_most_pairs_is_the_one_that_is_left() -> None:
    run = cut(1, ("n1", "n2"))
    run.stand()
    run.answer(("n1", "n2"), ("n2", "n3"))
    assert {run.state.members.workers[name].agent for name in run.leaving()} == {"n2"}
    run.reap()
    assert sorted(run.places()) == ["n1", "n3", "n4"]


def test_a_spare_that_is_cut_off_from_a_rank_is_no_place() -> None:
    run = cut(2)
    run.stand()
    run.answer(("n2", "n3"))
    first = run.state.members.workers[run.seats()[2]].agent
    run.reap()
    (replaced,) = run.emitted(events.Decided)
    assert [seat for seat, _, _ in replaced.replaced] == [2], "one host has named the other"
    spare = run.places()[2]
    assert first == "n3" and spare in ("n4", "n5")
    run.stand()
    run.answer((spare, "n1"))
    assert {run.state.members.workers[name].agent for name in run.leaving()} == {spare}
    run.reap()
    assert {*run.places()} == {"n1", "n2", *({"n4", "n5"} - {spare})}


@pytest.mark.parametrize("seconds", [HEAL_S - 1, HEAL_S + 1])
def test_without_a_place_the_run_waits_for_the_network_and_ends_by_name(seconds: float) -> None:
    run = cut(0)
    waited_s = 0.0
    while waited_s < seconds - 7:
        run.stand()
        run.tick(6)
        waited_s += 6
        run.answer(("n2", "n3"))
        assert run.rungs()[-1] == "retry" and len(run.texts()) == 1
    run.stand()
    run.tick(seconds - waited_s)
    run.answer(("n3", "n2"))
    ends = [one for one in run.history if isinstance(one, EndRun)]
    is_over = seconds > HEAL_S
    assert (run.state.mode == "stopping") == is_over and not ends
    if is_over:
        result = run.state.ending.result
        assert result is not None and result.exit_code == 3
        assert result.cause is not None and result.cause.detail == f"n2 and n3 {TEXT}"
        assert "repair the network" in run.emitted(events.Decided)[-1].reason


def test_a_host_that_was_started_again_is_a_place() -> None:
    run = cut()
    assert run.state.cuts.others("n3", run.now_ns) == {"n2"}
    hello = messages.AgentHello(host="n3", address="", capacity=2, lease_s=1e6)
    run.say("", hello, agent="n3", incarnation=2)
    assert not run.state.cuts.pairs


def test_a_host_that_does_not_answer_the_controller_is_not_cut_but_lost() -> None:
    run = CutDriver()
    run.start()
    n = run.state.progress.n + 1
    silent = run.place_of("n3")
    fault = events.Fault(kind="transport", detail="Connection timed out")
    for worker in run.seats()[:2]:
        body = messages.Status(
            generation=1, n=n, step=n, state="idle", fault=fault, unreachable=(silent,)
        )
        run.say(worker, body)
    lost = run.seats()[2]
    run.lose(lost, n, slots={f"before:{n}": b"own"}, kind="agent_lost", detail="power")
    assert run.rungs() == ["replace"] and not run.texts()
    assert run.emitted(events.Decided)[0].reason.startswith("rank 2 lost (agent_lost: power)")


def test_a_cut_that_a_recovery_meets_is_the_reason_of_the_move() -> None:
    run = CutDriver()
    run.start()
    n = run.state.progress.n + 1
    lost = run.seats()[0]
    run.lose(lost, n, slots={f"before:{n}": b"own"}, signal=9)
    for worker in run.seats()[1:]:
        run.status(worker, n, "running")
    assert run.rungs() == ["replace"] and run.places()[0] in ("n1", "n4")
    run.stand()
    run.answer(("n2", "n3"))
    assert run.rungs() == ["replace", "retry"] and not run.leaving()
    run.stand()
    run.answer(("n3", "n2"))
    run.reap()
    decided = run.emitted(events.Decided)[-1]
    assert f"n2 and n3 {TEXT}" in decided.reason and "n3" not in run.places()
