"""Drains of the scheduler: ranks leave a node for a spare one, or stay with a note."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.controller.controller_driver import ControllerDriver

from outlast import events
from outlast.controller.inputs import AnyEntry, SchedulerChecked
from outlast.controller.member_tables import NodePlacement
from outlast.controller.state_machine import initial
from outlast.launch.nodes.slurm_drains import CHECK, draining_nodes
from outlast.transport import messages

NODES = ("n1", "n2", "n3")  # the last one is a spare node


class NodesDriver(ControllerDriver):
    """Drives the controller of a run of several nodes; each worker speaks by its own agent."""

    def __init__(
        self, nodes: tuple[str, ...] = NODES, world: int = 2, spares: int = 1, term: int = 1
    ) -> None:
        super().__init__(world=world, spares=spares, term=term, lease_s=1e6, hello_s=1e6)
        placement = NodePlacement(agents=nodes, ranks_per_node=1)
        self.nodes = nodes
        self.state = initial(world, spares, self.limits, placement=placement)

    def say(self, worker: str, body: messages.AnyBody, **envelope: Any) -> list[Any]:
        name = body.worker if isinstance(body, messages.WorkerLostReport) else worker
        known = self.state.members.workers.get(name)
        return super().say(worker, body, **({"agent": known.agent} if known else {}), **envelope)

    def start(self) -> NodesDriver:
        """Start all nodes and workers, and complete the first phase."""
        self.begin()
        for node in self.nodes:
            self.meet(node)
        self.open()
        self.step()
        return self

    def meet(self, node: str, *workers: str) -> None:
        body = messages.AgentHello(host=node, address="", capacity=2, lease_s=1e6, workers=workers)
        self.say("", body, agent=node)
        self.say("", messages.Renew(), agent=node)

    def step(self) -> None:
        """Let each agent show its ranks in the second phase of the generation."""
        n = self.state.progress.n + 1
        for node in self.nodes:
            names = [each.name for each in self.state.members.crew(node) if each.seat >= 0]
            beats = dict.fromkeys(names, (n, n, "running", 0.0))
            self.say("", messages.Renew(beats=beats), agent=node)

    def hear(self, *nodes: str, **words: str) -> None:
        """Report these drains, and let the ranks of all nodes make a step, and come to its end."""
        self.drain(*nodes, **words)
        self.step()
        self.come_to_boundary()

    def drain(self, *nodes: str, reason: str = "a bad fan", at: str = "08") -> None:
        """Report these nodes as the ones that Slurm drains, by the words of scontrol."""
        answer = "\n".join(
            f"NodeName={node} NodeHostName={node} State=MIXED+DRAIN ThreadsPerCore=1"
            f" Reason={reason} [root@2026-11-28T00:12:{at}]"
            for node in nodes
        )
        self.now_ns += 1000
        found = draining_nodes(answer)
        self.feed(SchedulerChecked(t_ns=self.now_ns, check=CHECK, found=found))

    def leaving(self) -> set[str]:
        """Return the workers that were given up and have not been reaped."""
        return self.killed() & set(self.state.members.workers)

    def move(self) -> events.Decided:
        """Reap the workers that leave, let the others answer, and complete a phase."""
        n, generation = self.state.progress.n + 1, self.state.generation
        for worker in sorted(self.leaving()):
            self.lose(worker, n, slots={f"before:{n}": b"own"}, kind="requested", detail="killed")
        for worker in self.seats():
            if worker and self.state.generation == generation:
                self.status(worker, n, "running")
        self.heal(n)
        self.step()
        return self.emitted(events.Decided, history=True)[-1]

    def places(self) -> list[str]:
        """Return the node of each rank."""
        return [self.state.members.workers[name].agent for name in self.seats()]

    def drains(self) -> list[tuple[str, str]]:
        found = self.emitted(events.Warned, history=True)
        return [(one.host, one.severity) for one in found]

    def notes(self) -> list[str]:
        texts = [note.text for note in self.emitted(events.Note, history=True)]
        return [text for text in texts if "not moved yet" in text]


def test_the_ranks_of_a_drained_node_move_to_the_spare_node() -> None:
    run = NodesDriver().start()
    assert run.places() == ["n1", "n2"]
    run.hear("n2")
    assert run.leaving() == {run.seats()[1]} and run.state.mode == "closing"
    decided = run.move()
    assert (decided.rung, decided.n) == ("migrate", 1), "no committed step is lost"
    assert "a bad fan" in decided.reason and run.places() == ["n1", "n3"]
    for _ in range(3):
        run.hear("n2")
    assert run.state.generation == 2 and run.drains() == [("n2", "drain")]


def test_a_drain_waits_for_the_first_phase_of_a_generation() -> None:
    run = NodesDriver()
    run.begin()
    for node in NODES:
        run.meet(node)
    run.open()
    run.drain("n2")
    assert not run.leaving()
    run.step()
    run.come_to_boundary()
    assert run.leaving() == {run.seats()[1]}


def test_the_ranks_of_the_controllers_node_move_too() -> None:
    run = NodesDriver().start()
    run.hear("n1")
    assert run.move().rung == "migrate" and run.places() == ["n3", "n2"]


def test_without_a_spare_a_drain_is_noted_once() -> None:
    run = NodesDriver(("n1", "n2"), spares=0).start()
    for _ in range(3):
        run.hear("n2")
    assert not run.leaving() and run.drains() == [("n2", "drain")]
    (note,) = run.notes()
    assert "no warm spare is on a healthy device" in note


def test_of_two_drained_nodes_one_moves_to_the_only_spare() -> None:
    run = NodesDriver().start()
    run.hear("n1", "n2")
    assert len(run.leaving()) == 1 and len(run.notes()) == 1
    run.move()
    run.hear("n1", "n2")
    assert run.state.mode == "open" and "n3" in run.places() and len(run.notes()) == 1


def test_a_drain_of_all_nodes_moves_no_rank() -> None:
    run = NodesDriver().start()
    for _ in range(3):
        run.hear(*NODES)
    assert not run.leaving() and run.state.generation == 1
    assert len(run.notes()) == 2 and len(run.drains()) == 3


def test_a_drained_spare_node_gets_ranks_only_after_a_failure() -> None:
    run = NodesDriver().start()
    run.hear("n3")
    assert not run.leaving() and not run.notes(), "it has no ranks"
    run.hear("n2", "n3")
    assert not run.leaving() and len(run.notes()) == 1
    run.lose(run.seats()[1], 1, slots={"before:1": b"own"}, signal=9)
    run.status(run.seats()[0], 1, "running")
    assert run.places() == ["n1", "n3"], "worse than a healthy node, better than none"


def test_a_drain_that_is_taken_back_is_over_and_may_come_again() -> None:
    run = NodesDriver(("n1", "n2"), spares=0).start()
    run.hear("n2")
    run.hear()
    assert run.drains() == [("n2", "drain"), ("n2", "healthy")]
    assert not run.state.findings.warned
    run.hear("n2", at="59")
    assert run.drains()[2:] == [("n2", "drain")] and len(run.notes()) == 2


def test_a_drain_that_is_taken_back_before_the_step_moves_no_rank() -> None:
    run = NodesDriver()
    run.begin()
    for node in NODES:
        run.meet(node)
    run.open()
    run.drain("n2")
    run.drain()
    run.step()
    assert not run.leaving() and run.state.generation == 1


def test_a_node_without_a_name_of_the_run_is_ignored() -> None:
    run = NodesDriver().start()
    run.hear("n9", "n22")
    assert not run.leaving() and not run.drains()


def test_slurm_may_know_the_short_name_of_a_host() -> None:
    run = NodesDriver(("n1.site", "n2.site", "n3.site")).start()
    run.hear("n2")
    assert run.leaving() == {run.seats()[1]}
    run.move()
    assert run.places() == ["n1.site", "n3.site"]


def test_a_later_term_does_not_move_the_same_drain_again() -> None:
    run = NodesDriver().start()
    run.hear("n2")
    run.move()
    later = NodesDriver(term=2)
    kept = msgspec.msgpack.encode(run.journal())
    later.begin(journal=msgspec.msgpack.decode(kept, type=tuple[AnyEntry, ...]))
    for node in NODES:
        later.meet(node, *(w.name for w in run.state.members.crew(node)))
    for worker in run.seats():
        later.hello(worker)
        later.status(worker, 1, "idle")
    later.heal(1)
    later.step()
    later.hear("n2")
    assert later.places() == ["n1", "n3"] and not later.leaving() & set(later.seats())


@pytest.mark.parametrize(
    "reason",
    [
        "see State=IDLE NodeHostName=n1 NodeName=n1",
        "\x1b[2J[root@2026-01-01T00:00:00]",
        "x" * 100_000,
        "two\u2028lines\rof\x85text\x0b\x1c",
        "a=b =c= [x@y] \udcff",
    ],
    ids=["fields", "escapes", "long", "lines", "signs"],
)
def test_a_reason_is_text_whatever_is_in_it(reason: str) -> None:
    run = NodesDriver().start()
    run.hear("n2", reason=reason)
    assert run.leaving() == {run.seats()[1]}
    decided = run.move()
    assert run.places() == ["n1", "n3"] and len(decided.reason) < 2_000
    (drain,) = run.emitted(events.Warned, history=True)
    assert (drain.host, drain.code) == ("n2", "root@2026-11-28T00:12:08")
    assert drain.detail.isprintable()
    msgspec.json.encode((drain, decided))
