"""One turn of the controller: a private copy of the state and the actions that it leads to."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from outlast import events, wire
from outlast.core.contract import Action, AnyEntry, Emit, Journal, Send
from outlast.core.state import Mode, State, Worker

_NOTES_IN_FULL = 16


class Turn:
    """What the rooms of core/ work on; made and thrown away by one call of `handle`."""

    def __init__(self, state: State, now_ns: int) -> None:
        self.state = state.copy()
        self.now_ns = now_ns
        self.actions: list[Action] = []

    def send(self, worker: Worker, body: wire.AnyBody) -> None:
        self.actions.append(Send(agent=worker.agent, worker=worker.name, body=body))

    def tell(self, agent: str, body: wire.AgentBody) -> None:
        self.actions.append(Send(agent=agent, worker="", body=body))

    def emit(self, event: events.AnyEvent) -> None:
        self.actions.append(Emit(event=event))

    def journal(self, entry: AnyEntry) -> None:
        self.actions.append(Journal(entry=entry))

    def note(
        self,
        text: str,
        worker: str = "",
        seat: int = -1,
        level: Literal["info", "warning"] = "warning",
    ) -> None:
        self.emit(events.Note(t_ns=self.now_ns, worker=worker, seat=seat, text=text, level=level))

    def drop(self, envelope: wire.Envelope, why: str) -> None:
        """Count a frame that is not acted on; say so, ever more rarely when there are many."""
        state = self.state
        state.dropped += 1
        count = state.dropped
        if count <= _NOTES_IN_FULL or count & (count - 1) == 0:
            sender = envelope.worker or envelope.agent
            kind = type(envelope.body).__name__
            self.note(f"frame {kind} of {sender} dropped: {why} ({count} so far)", level="info")

    def enter(self, mode: Mode) -> None:
        self.state.mode = mode
        self.state.since_ns = self.now_ns

    def change(self, name: str, **changes: Any) -> Worker:
        worker = msgspec.structs.replace(self.state.workers[name], **changes)
        self.state.workers[name] = worker
        return worker

    def kill(self, name: str, fault: events.Fault) -> None:
        """Give a worker up: Kill now, Lost follows. The first reason stays."""
        worker = self.state.workers[name]
        if worker.killed_ns:
            return
        worker = self.change(name, killed_ns=self.now_ns, kills=1, fault=worker.fault or fault)
        self.tell(worker.agent, wire.Kill(worker=name, reason=fault.detail))

    def blame(self, worker: Worker, kind: events.FaultKind, detail: str) -> events.Fault:
        """A fault that the controller itself found at a worker."""
        agent = self.state.agents.get(worker.agent)
        return events.Fault(
            kind=kind,
            detail=detail,
            worker=worker.name,
            seat=worker.seat,
            host=agent.host if agent else "",
            n=worker.status.n if worker.status else -1,
            t_ns=self.now_ns,
        )
