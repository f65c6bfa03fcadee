"""Response to a failure: close the generation and collect the answer of every worker."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from outlast import events
from outlast.controller.controller_state import ControllerTurn, WorkerRecord
from outlast.controller.recovery import network_cuts
from outlast.transport import messages

_FAULTS_MAX = 64


def record_fault(turn: ControllerTurn, fault: events.Fault, how: str) -> None:
    """Add a fault to the open incident, or begin one; close the generation if it is alive."""
    state = turn.state
    if state.mode == "awaiting":
        state.incident.early = (*state.incident.early, (how, fault))[-_FAULTS_MAX:]
    if state.mode not in ("gathering", "connecting", "open", "closing"):
        return
    incident = state.incident
    if not incident.number:
        incident.count += 1
        incident.number = incident.count
    incident.faults = (*incident.faults, fault)[-_FAULTS_MAX:]
    incident.newest = (*incident.newest, fault)[-_FAULTS_MAX:]
    _emit_noticed(turn, fault, how)
    if state.mode != "closing":
        close(turn, fault.detail)


def _emit_noticed(turn: ControllerTurn, fault: events.Fault, how: str) -> None:
    number = turn.state.incident.number
    generation = turn.state.generation
    turn.emit(
        events.Noticed(
            t_ns=turn.now_ns, incident=number, generation=generation, how=how, fault=fault
        )
    )


def restore_count(turn: ControllerTurn, count: int) -> None:
    """Number incidents on from those of earlier terms."""
    turn.state.incident.count = count


def begin_incident(turn: ControllerTurn, faults: Iterable[tuple[str, events.Fault]]) -> None:
    """Begin the incident of a term that takes over from another, with what was found early and with
    `faults`, which are no attempt's. Each has the way in which it was noticed."""
    incident = turn.state.incident
    incident.count += 1
    incident.number = incident.count
    noticed = (*incident.early, *faults)
    incident.early = ()
    incident.faults = tuple(fault for _, fault in noticed)
    for how, fault in noticed:
        _emit_noticed(turn, fault, how)


def note_early_loss(turn: ControllerTurn, fault: events.Fault) -> None:
    """Record once why a worker was lost while no controller could act."""
    if all(known.worker != fault.worker for _, known in turn.state.incident.early):
        record_fault(turn, fault, "pidfd")


def take_newest(turn: ControllerTurn) -> tuple[events.Fault, ...]:
    """Return the faults since the last call: those of one generation."""
    newest = turn.state.incident.newest
    turn.state.incident.newest = ()
    return newest


def end_incident(turn: ControllerTurn) -> None:
    """End the incident: the next generation is open."""
    turn.state.incident.number = 0
    turn.state.incident.faults = ()


def close(turn: ControllerTurn, reason: str) -> None:
    """Close the generation: no vote of it succeeds once its workers have received Close."""
    state = turn.state
    turn.enter("closing")
    alive = [worker for worker in state.generation_members() if not worker.killed_ns]
    turn.send_all(alive, messages.Close(generation=state.generation, reason=reason))
    turn.emit(
        events.GenerationClosed(
            t_ns=turn.now_ns, incident=state.incident.number, generation=state.generation
        )
    )


def ends_its_worker(body: messages.AnyBody) -> bool:
    """Return whether a worker reports, of whatever generation, that it cannot go on."""
    return isinstance(body, messages.Status) and body.state in ("torn", "broken")


def on_answer(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> None:
    """Handle a worker's Status: its answer to Close, or the first report of a failure."""
    state = turn.state
    known = worker.status
    if ends_its_worker(body):
        _must_be_replaced(turn, worker, body)
        return
    if known is not None and known.generation == body.generation:
        if (known.n, known.state) != (body.n, body.state):
            detail = (
                f"rank {worker.seat} changed its answer on generation {body.generation} from"
                f" {known.state} at phase {known.n} to {body.state} at {body.n}; it was given up"
            )
            give_up(turn, worker, turn.blame(worker, "torn", detail), "report")
        return
    worker = turn.change(worker.name, status=body)
    state.progress.reach(body.n, body.step)
    found = network_cuts.learn(turn, worker, body)
    fault = _complete(turn, worker, found) if found else None
    if fault is None and state.mode != "closing":
        fault = turn.blame(worker, "transport", f"rank {worker.seat} left the generation")
    if fault is not None:
        record_fault(turn, fault, "peer" if fault.kind == "transport" else "report")
    if state.mode != "closing":
        return
    _report(turn, worker, body)


def _must_be_replaced(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> None:
    """Give up a worker that reports itself torn or broken, whatever it reported before."""
    known = _complete(turn, worker, body.fault) if body.fault else None
    if known is None and body.state == "broken":  # the end of another has cut its set-up
        detail = f"rank {worker.seat} was cut in set-up or a rehearsal before phase {body.n + 1}"
        known = turn.blame(worker, "transport", detail)
    detail = f"rank {worker.seat} cannot continue: {body.state} at phase {body.n + 1}"
    give_up(turn, worker, known or turn.blame(worker, "torn", detail), "report")
    _report(turn, worker, body)


def _report(turn: ControllerTurn, worker: WorkerRecord, body: messages.Status) -> None:
    turn.emit(
        events.Reported(
            t_ns=turn.now_ns,
            incident=turn.state.incident.number,
            generation=body.generation,
            worker=worker.name,
            seat=worker.seat,
            n=body.n,
            state=body.state,
        )
    )


def give_up(turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault, how: str) -> None:
    """Kill a worker for a fault found from outside; a seat's loss closes its generation."""
    fresh = not worker.killed_ns
    turn.kill(worker.name, fault)
    starting = turn.state.progress.first and turn.state.mode == "gathering"  # Lost follows
    if fresh and worker.seat >= 0 and not starting:
        record_fault(turn, fault, how)


def explain_exit(worker: WorkerRecord, fault: events.Fault) -> events.Fault:
    """Return the fault of a script that ended while others go on: by its exit code, if it gave
    one."""
    if fault.kind != "contract" or not worker.finished or not worker.exit_code:
        return fault
    detail = f"its script ended with exit code {worker.exit_code}, while other ranks went on"
    return replace(fault, kind="exited", exit_code=worker.exit_code, detail=detail)


def _complete(turn: ControllerTurn, worker: WorkerRecord, fault: events.Fault) -> events.Fault:
    return replace(
        fault, worker=fault.worker or worker.name, seat=worker.seat, t_ns=fault.t_ns or turn.now_ns
    )
