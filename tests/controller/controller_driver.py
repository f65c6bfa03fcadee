"""A driver of the controller for tests: frames in, actions out."""

from __future__ import annotations

from typing import Any

from outlast import events
from outlast.config import Limits
from outlast.controller import inputs
from outlast.controller.controller_state import MigrateOn
from outlast.controller.save_schedule.save_tiers import SavePolicy
from outlast.controller.state_machine import handle, initial
from outlast.transport import messages

S = 1_000_000_000


class ControllerDriver:
    """Drives `handle` for one agent; stores the newest actions in `actions`, all in `history`."""

    def __init__(
        self,
        world: int = 2,
        spares: int = 1,
        term: int = 1,
        policy: SavePolicy | None = None,
        migrate_on: MigrateOn = "",
        **limits: Any,
    ) -> None:
        self.world, self.term = world, term
        self.limits = Limits(**limits)
        self.state = initial(world, spares, self.limits, policy, migrate_on)
        self.now_ns = S
        self.verifies = True  # every checkpoint is complete, and the answer comes at once
        self.actions: list[inputs.Action] = []
        self.history: list[inputs.Action] = []
        self._seqs: dict[str, int] = {}

    def feed(self, event: Any) -> list[inputs.Action]:
        """Process one input; answer Verify at once where `verifies` is set."""
        self.state, self.actions = handle(self.state, event)
        self.state.validate()
        self.history += self.actions
        requests = [action for action in self.actions if isinstance(action, inputs.Verify)]
        if requests and self.verifies:
            before = self.actions
            checkpoint = self.state.saves.checkpoint
            self.feed(
                inputs.CheckpointFound(
                    t_ns=self.now_ns, generation=requests[0].generation, checkpoint=checkpoint
                )
            )
            self.actions = before + self.actions
        return self.actions

    def begin(
        self,
        journal: tuple[Any, ...] = (),
        checkpoint: Any = None,
        succession: inputs.Succession | None = None,
    ) -> ControllerDriver:
        """Begin the term with this journal and checkpoint."""
        self.feed(
            inputs.BeginTerm(
                t_ns=self.now_ns,
                run="r",
                term=self.term,
                journal=journal,
                checkpoint=checkpoint,
                succession=succession,
            )
        )
        return self

    def say(self, worker: str, body: messages.AnyBody, **envelope: Any) -> list[inputs.Action]:
        """Send a message of a worker ("": of the agent), 1 us later."""
        self.now_ns += 1000
        seq = self._seqs[worker] = self._seqs.get(worker, 0) + 1
        frame = {"term": self.term, "agent": "a", "incarnation": 1, "seq": seq, **envelope}
        return self.feed(
            inputs.Received(
                t_ns=self.now_ns,
                envelope=messages.MessageEnvelope(run="r", worker=worker, body=body, **frame),
            )
        )

    def agent(self, *workers: str, capacity: int = 9, **envelope: Any) -> list[inputs.Action]:
        """Register the agent, with its living workers."""
        body = messages.AgentHello(
            host="h", address="", capacity=capacity, lease_s=10, workers=workers
        )
        self.say("", body, **envelope)
        return self.report(**envelope) if self.term > 1 else self.actions

    def report(self, **envelope: Any) -> list[inputs.Action]:
        """End what the agent has to repeat to a later term, and keep the actions so far."""
        before = self.actions
        self.actions = before + self.say("", messages.Renew(), **envelope)
        return self.actions

    def tick(self, seconds: float) -> list[inputs.Action]:
        """Advance the clock by `seconds` and wake the controller."""
        self.now_ns += int(seconds * S)
        return self.feed(inputs.Tick(t_ns=self.now_ns))

    def stop(self) -> list[inputs.Action]:
        """Request the end of the run."""
        return self.feed(inputs.StopRequested(t_ns=self.now_ns, reason="asked"))

    def seats(self) -> tuple[str, ...]:
        """Return the worker of each seat, "" for an empty one."""
        return tuple(self.state.members.seats)

    def hello(self, worker: str, **fingerprint: str) -> list[inputs.Action]:
        """Register a warm worker."""
        body = messages.WorkerHello(pid=1, fingerprint=fingerprint, address=f"{worker}:1")
        return self.say(worker, body)

    def open(self, n: int = 0) -> ControllerDriver:
        """Drive the controller from BeginTerm to an open first generation."""
        if not self.state.members.agents:
            self.agent()
        for worker in list(self.state.members.workers):
            self.hello(worker)
        self.heal(n)
        assert self.state.mode == "open"
        return self

    def heal(self, n: int, digest: str = "d") -> None:
        """Make all seated workers ready and joined, with their transfers done."""
        generation = self.state.generation
        for worker in self.seats():
            if self.state.members.workers[worker].ready != generation:
                self.say(worker, messages.WorkerReady(generation=generation, n=n))
        sent: dict[int, dict[int, tuple[str, int, float]]] = {}
        received: dict[int, dict[int, tuple[str, int, float]]] = {}
        for donor, joiner in self.state.progress.transfers:
            sent.setdefault(donor, {})[joiner] = ("d", 1, 0.1)
            received.setdefault(joiner, {})[donor] = (digest, 1, 0.1)
        for seat, worker in enumerate(self.seats()):
            body = messages.Joined(
                generation=generation, sent=sent.get(seat, {}), received=received.get(seat, {})
            )
            self.say(worker, body)

    def commit(self, n: int) -> list[inputs.Action]:
        """Report through the agent that every rank has completed `n` phases."""
        return self.say("", messages.Renew(beats=dict.fromkeys(self.seats(), (n, n, "idle", 0.0))))

    def status(self, worker: str, n: int, state: str, fault: Any = None) -> list[inputs.Action]:
        """Send a worker's answer to the closing of the generation."""
        body = messages.Status(
            generation=self.state.generation, n=n, step=n, state=state, fault=fault
        )
        return self.say(worker, body)

    def come_to_boundary(self) -> list[inputs.Action]:
        """Let workers that were asked to leave this generation answer behind their phase."""
        n = self.state.progress.n + 1
        for worker, body in self.sent(messages.Leave, history=True):
            if self.state.mode == "open" and body.generation == self.state.generation:
                self.status(worker, n, "idle")
        return self.actions

    def lose(
        self, worker: str, n: int = 0, state: str = "running", slots: Any = None, **fault: Any
    ) -> list[inputs.Action]:
        """Report through the agent that a worker was lost."""
        fields = {"kind": "killed", "detail": f"{worker} was killed", **fault}
        body = messages.WorkerLostReport(
            worker=worker, fault=events.Fault(**fields), n=n, state=state, slots=slots or {}
        )
        return self.say("", body)

    # --- outputs ---------

    def sent(self, kind: type[Any], history: bool = False) -> list[tuple[str, Any]]:
        """Return the (worker, body) of messages of one kind that were sent."""
        actions = self.history if history else self.actions
        return [
            (worker, action.body)
            for action in actions
            if isinstance(action, inputs.Send) and isinstance(action.body, kind)
            for worker in action.workers or ("",)
        ]

    def emitted(self, kind: type[Any], history: bool = False) -> list[Any]:
        """Return the emitted events of one kind."""
        actions = self.history if history else self.actions
        return [
            a.event for a in actions if isinstance(a, inputs.Emit) and isinstance(a.event, kind)
        ]

    def journal(self) -> tuple[Any, ...]:
        """Return all journal entries so far."""
        return tuple(a.entry for a in self.history if isinstance(a, inputs.AppendJournal))

    def decision(self) -> inputs.DecisionMade:
        """Return the last decision of the journal."""
        return [e for e in self.journal() if isinstance(e, inputs.DecisionMade)][-1]

    def end(self) -> inputs.EndRun | None:
        """Return the action that ended the run, None while it runs."""
        return next((a for a in self.history if isinstance(a, inputs.EndRun)), None)

    def killed(self) -> set[str]:
        """Return the workers whose kill was ordered."""
        return {body.worker for _, body in self.sent(messages.Kill, history=True)}
