"""Generations: who sits in which seat, when a generation closes, and what then is decided.

`handle(state, event) -> (state, actions)` is the whole controller; `launch/controller.py` feeds it
real frames, `outlast.testing` millions of simulated ones. The invariants (a) to (g) are in
docs/protocol.md. The rooms behind this façade each hold one idea: roster (who is there), incident
(a failure and its answers), decide (the way on), regroup (from a decision to an open generation),
exchange (what passes through), saving and pacing (checkpoints on request, and how often), moving
(away from what node checks find), ending, resume (a later term), clock (deadlines).
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast import wire
from outlast.config import Limits
from outlast.core import (
    clock,
    decide,
    ending,
    exchange,
    incident,
    moving,
    pacing,
    regroup,
    restart,
    resume,
    roster,
    saving,
)
from outlast.core.audit import protocol as audit
from outlast.core.contract import (
    Action,
    AgentGone,
    AnyEntry,
    Begin,
    CheckpointFound,
    DecisionMade,
    Emit,
    End,
    Input,
    Journal,
    JournalEntry,
    Moved,
    Opened,
    PutKept,
    Received,
    RecordKept,
    SaveAsked,
    Send,
    SharedKept,
    StoodStill,
    StopAsked,
    Tick,
    Verify,
    Wake,
)
from outlast.core.policy import SavePolicy
from outlast.core.state import Agent, MigrateOn, State, Worker
from outlast.core.turn import Turn

__all__ = [
    "Action", "AgentGone", "AnyEntry", "Begin", "CheckpointFound", "DecisionMade", "Emit", "End",
    "Input", "Journal", "JournalEntry", "Moved", "Opened", "PutKept", "Received", "RecordKept",
    "SaveAsked", "SavePolicy", "Send", "SharedKept", "State", "StoodStill", "StopAsked", "Tick",
    "Verify", "Wake", "handle", "handle_all", "initial",
]  # fmt: skip


def initial(
    world: int,
    spares: int,
    limits: Limits,
    run: str = "",
    policy: SavePolicy | None = None,
    migrate_on: MigrateOn = "",
) -> State:
    """The state before Begin of a job with `world` ranks and `spares` workers beside them."""
    policy = policy or SavePolicy()
    return State(
        world=world, spares=spares, limits=limits, run=run, policy=policy, migrate_on=migrate_on
    )


def handle(state: State, event: Input) -> tuple[State, list[Action]]:
    """One turn: `state` stays as it was; actions are to be carried out in their order."""
    return handle_all(state, (event,))


def handle_all(state: State, inputs: Sequence[Input]) -> tuple[State, list[Action]]:
    """One turn for inputs that came together: what follows is decided when all have been heard. A
    turn costs as much as there are workers, so that their answers cost N in one, and N^2 in N.
    """
    turn = Turn(state, state.now_ns)
    runs = state.mode not in ("unborn", "ended")
    for event in inputs:
        turn.state.now_ns = turn.now_ns = max(event.t_ns, turn.now_ns)
        _take(turn, event)
    if runs:
        clock.expire(turn)
    _advance(turn)
    clock.wake(turn)
    return turn.state, turn.actions


def _take(turn: Turn, event: Input) -> None:
    if isinstance(event, Begin):
        resume.begin(turn, event)
    elif turn.state.mode not in ("unborn", "ended"):
        if isinstance(event, Received):
            _received(turn, event.envelope)
        elif isinstance(event, AgentGone):
            agent = turn.state.agents.get(event.agent)
            if agent is not None and agent.incarnation == event.incarnation:
                roster.gone(turn, agent)
        elif isinstance(event, StopAsked):
            ending.asked(turn, event.reason)
        elif isinstance(event, SaveAsked):
            saving.asked(turn, event.reason)
        elif isinstance(event, StoodStill):
            clock.excuse(turn, event.gap_ns)
        elif isinstance(event, CheckpointFound):
            restart.found(turn, event)


def _advance(turn: Turn) -> None:
    """Follow every step that has become possible, until nothing moves."""
    state = turn.state
    before = None
    while before != (state.mode, state.generation):
        before = (state.mode, state.generation)
        if state.mode == "awaiting":
            resume.decide_when_met(turn)
        elif state.mode == "gathering":
            regroup.gather(turn)
        elif state.mode == "connecting":
            regroup.open_when_joined(turn)
        elif state.mode == "open":
            ending.finish_when_finished(turn)
            moving.move_when_possible(turn)
        elif state.mode == "closing":
            decide.decide_when_answered(turn)
        elif state.mode == "clearing":
            restart.verify_when_clear(turn)
        elif state.mode == "stopping":
            ending.end_when_empty(turn)


def _received(turn: Turn, envelope: wire.Envelope) -> None:
    """Drop what is late, repeated or nobody's; hand on the rest."""
    state = turn.state
    agent = state.agents.get(envelope.agent)
    greeting = isinstance(envelope.body, wire.AgentHello)
    if envelope.term < state.term:
        turn.drop(envelope, f"of term {envelope.term}, now {state.term}")
    elif agent is not None and envelope.incarnation < agent.incarnation:
        turn.drop(envelope, f"of incarnation {envelope.incarnation}, now {agent.incarnation}")
    elif not greeting and (agent is None or envelope.incarnation > agent.incarnation):
        turn.drop(envelope, "its agent has not offered itself")
    elif not _in_order(turn, envelope, agent):
        turn.drop(envelope, f"number {envelope.seq} was passed already")
    elif envelope.worker:
        worker = state.workers.get(envelope.worker)
        if worker is None or worker.agent != envelope.agent:
            turn.drop(envelope, "its worker is not of this run any more")
        elif worker.killed_ns:
            turn.drop(envelope, "its worker was given up")
        else:
            _from_worker(turn, envelope, worker)
    elif greeting:
        assert isinstance(envelope.body, wire.AgentHello)
        for worker in roster.offered(turn, envelope, envelope.body):
            regroup.remind(turn, worker)
    elif agent is not None and agent.lapsed:
        turn.drop(envelope, "its agent's lease is out")
    elif agent is not None:
        _from_agent(turn, envelope, agent)


def _in_order(turn: Turn, envelope: wire.Envelope, agent: Agent | None) -> bool:
    sender = envelope.worker or f"agent {envelope.agent}"
    seqs = turn.state.seqs
    if agent is None or envelope.incarnation > agent.incarnation:
        seqs.pop(sender, None)
    if envelope.seq <= seqs.get(sender, 0):
        return False
    seqs[sender] = envelope.seq
    return True


def _from_agent(turn: Turn, envelope: wire.Envelope, agent: Agent) -> None:
    body = envelope.body
    state = turn.state
    match body:
        case wire.Renew():
            roster.renewed(turn, agent, body)
        case wire.Spawned():
            roster.spawned(turn, agent, body)
        case wire.Lost():
            worker = state.workers.get(body.worker)
            if worker is not None and worker.agent == agent.name:
                roster.lost(turn, worker, body)
            elif not resume.left_behind(turn, body):
                turn.drop(envelope, f"{body.worker} is not of this run any more")
        case wire.Suspect():
            worker = state.workers.get(body.worker)
            if worker is not None:
                incident.give_up(turn, worker, body.fault, "heartbeat")
            elif not body.worker and state.mode == "open":
                incident.notice(turn, body.fault, "heartbeat")
            else:
                turn.drop(envelope, f"{body.worker or 'nobody'} cannot be suspected now")
        case wire.Checked():
            moving.checked(turn, agent, body)
        case _:
            turn.drop(envelope, "not for an agent to say")


def _from_worker(turn: Turn, envelope: wire.Envelope, worker: Worker) -> None:
    state = turn.state
    body = envelope.body
    match body:
        case wire.Hello():
            roster.hello(turn, worker, body)
        case wire.SharedAsk():
            exchange.ask(turn, worker, body.name)
        case wire.SharedMade():
            exchange.made(turn, body)
        case wire.Checkpointed():
            roster.checkpointed(turn, body)
            pacing.saved(turn, body)
        case wire.SaveFailed():
            saving.failed(turn, body)
        case _ if worker.member != state.generation or worker.seat < 0:
            turn.drop(envelope, "its worker has no seat in this generation")
        case wire.Put(generation=0):
            exchange.put(turn, worker, body)
        case wire.Status(state="torn" | "broken"):
            incident.answered(turn, worker, body)
        case wire.Status() | wire.Ready() | wire.Joined() | wire.Put() if (
            body.generation != state.generation
        ):
            turn.drop(envelope, f"of generation {body.generation}, now {state.generation}")
        case wire.Status():
            incident.answered(turn, worker, body)
        case wire.Audited() | wire.AuditNamed() if (
            body.generation != state.generation or state.mode != "open"
        ):
            turn.drop(envelope, f"an audit of generation {body.generation}, out of turn")
        case wire.Audited():
            audit.reported(turn, worker, body)
        case wire.AuditNamed():
            audit.named(turn, worker, body)
        case wire.Protected():
            exchange.protected(turn, worker, body)
        case wire.Recorded():
            exchange.record(turn, worker, body)
        case wire.Finished():
            state.reached = max(state.reached, (body.n, body.step))
            turn.change(worker.name, finished=True)
        case _ if state.mode == "closing":
            turn.drop(envelope, f"generation {state.generation} is closed")
        case wire.Put():
            exchange.put(turn, worker, body)
        case wire.Ready() if state.mode == "gathering":
            regroup.ready(turn, worker, body)
        case wire.Joined() if state.mode == "connecting":
            turn.change(worker.name, joined=body)
        case _:
            turn.drop(envelope, f"out of turn ({state.mode})")
