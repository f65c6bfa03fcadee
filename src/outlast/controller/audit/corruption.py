"""Corruption that a vote has shown: redone or replaced, transient or lasting, and its findings.

    what differs       `again`   verdict       then
    gradients alone    1         any           the phase is redone in place; a finding "transient"
                                               if a majority had equal ones before
    gradients alone    2, ...    minority      lasting: its workers are replaced
    gradients alone    2, ...    no majority   the generation closes undecided
    gradients alone    2, ...    never equal   they differ by design: votes leave them out
    contributions      any       minority      of a replay (replay_rule): transient, or, if they
                                               repeat, lasting: its workers are replaced
    other state        any       minority      its workers are replaced; transient unless the same
                                               device had wrong bits within the last hour
    other state        any       no majority   the generation closes undecided

A lasting finding asks for the node's drain, and spares on other devices come first. Whether wrong
bits are of a device cannot be known where replicas are two: then the ranks are noted, and none is
blamed.
"""

from __future__ import annotations

from msgspec.structs import replace

from outlast import events
from outlast.controller import inputs, planned_migration
from outlast.controller.audit.audit_records import (
    AuditRound,
    AuditState,
    AuditVerdict,
    CorruptionStrike,
)
from outlast.controller.controller_state import S_NS, ControllerTurn
from outlast.controller.sentinels import replay_rule
from outlast.transport import messages

CHECK = "corruption"
GRADIENTS = "gradients"
CONTRIBUTIONS = replay_rule.CONTRIBUTIONS
WINDOW_S = 3600.0
STRIKES_MAX = 256
AGAIN_MAX = 3  # disputes of one phase without a verdict; beyond, votes leave the kinds out


def are_gradients(verdict: AuditVerdict) -> bool:
    """Return whether gradients alone differ, which no optimizer has used yet."""
    return verdict.kinds == (GRADIENTS,)


def are_contributions(verdict: AuditVerdict) -> bool:
    """Return whether what differs is what replays of one rank's batch have given."""
    return verdict.kinds == (CONTRIBUTIONS,)


def contribution_text(rank: int, audit_round: AuditRound, verdict: AuditVerdict) -> str:
    """Return what a rank has computed otherwise than the others from the same batch."""
    return (
        f"rank {rank} computes another contribution than ranks"
        f" {', '.join(map(str, verdict.majority))} from the same batch in step"
        f" {audit_round.step + 1}: {_tensors(verdict)}"
    )


def answer_dispute(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> bool:
    """Let the ranks redo a disputed phase in place; return False where some must be replaced."""
    if verdict.outcome == "agreed":
        without = verdict.kinds if audit_round.again >= AGAIN_MAX else ()
        _answer(turn, audit_round, without)
        return True
    if are_contributions(verdict) and not (audit_round.repeats and verdict.outcome == "minority"):
        if verdict.outcome == "minority":
            record_strikes(turn, audit_round, verdict)
        _answer(turn, audit_round)
        return True
    if not are_gradients(verdict):
        return False
    ranks = ", ".join(map(str, sorted(verdict.minority + verdict.majority)))
    if audit_round.again == 1:
        if verdict.outcome == "minority" and audit_round.has_equal_gradients:
            record_strikes(turn, audit_round, verdict)
        else:
            why = "no majority" if audit_round.has_equal_gradients else "were never all equal"
            turn.note(
                f"ranks {ranks} had different gradients after reduction in step"
                f" {audit_round.step + 1} ({_tensors(verdict)}), and {why}; the step is redone"
            )
        _answer(turn, audit_round)
        return True
    if audit_round.has_equal_gradients:
        return False
    turn.note(
        f"gradients of ranks {ranks} differ again after reduction ({_tensors(verdict)}) and have"
        " never been found equal: they differ by design, and votes do not compare them",
        level="info",
    )
    _answer(turn, audit_round, (GRADIENTS,))
    return True


def record_strikes(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    """Record wrong bits of the minority's ranks, and report each as transient or lasting."""
    state = turn.state
    for rank in verdict.minority:
        worker = state.occupant(rank)
        if worker is None:
            continue
        host = state.members.agents[worker.agent].host
        device = audit_round.devices.get(rank, "") or f"rank {rank}"
        earlier = [one for one in _recent(turn) if (one.host, one.device) == (host, device)]
        # The same device again: in the redo of one phase, or within the hour.
        strike = CorruptionStrike(
            host=host,
            device=device,
            rank=rank,
            n=audit_round.n,
            step=audit_round.step,
            t_ns=turn.now_ns,
            is_lasting=bool(earlier) or audit_round.repeats,
        )
        turn.journal(inputs.CorruptionFound(strike=strike))
        strikes = (*_recent(turn), strike)[-STRIKES_MAX:]
        state.audit = replace(state.audit, strikes=strikes)
        _report(turn, strike, verdict, worker.name, audit_round)


def _report(
    turn: ControllerTurn,
    strike: CorruptionStrike,
    verdict: AuditVerdict,
    worker: str,
    audit_round: AuditRound,
) -> None:
    majority = ", ".join(map(str, verdict.majority))
    detail = (
        f"rank {strike.rank} ({worker}) differs from ranks {majority} in {_tensors(verdict)} before"
        f" step {strike.step + 1}"
    )
    if are_gradients(verdict):
        detail = (
            f"rank {strike.rank} ({worker}) has another reduced gradient than ranks {majority} in"
            f" step {strike.step + 1}: {_tensors(verdict)}; it was not applied"
        )
        is_first = audit_round.again == 1
        detail += ", and the step is redone" if is_first else ", and it came again in the redo"
    if are_contributions(verdict):
        again = "came again" if audit_round.repeats else "did not come again"
        detail = (
            f"{contribution_text(strike.rank, audit_round, verdict)}; it {again} when it was"
            " computed again, and was not applied"
        )
        if audit_round.repeats and audit_round.since is not None:
            detail += f"; its last equal replay was before step {audit_round.since.step + 1}"
    if strike.is_lasting:
        detail += "; the device had wrong bits before: drain the node and test it"
    one = events.Warned(
        t_ns=turn.now_ns,
        host=strike.host,
        check=CHECK,
        symptom="other",
        severity="drain" if strike.is_lasting else "warn",
        code="lasting" if strike.is_lasting else "transient",
        device=strike.device,
        detail=detail,
        worker=worker,
    )
    if strike.is_lasting:
        planned_migration.add_finding(turn, one)
    else:
        turn.emit(one)


def with_strike(audit: AuditState, strike: CorruptionStrike) -> AuditState:
    """Return the state of audits with wrong bits that an earlier term has found."""
    return replace(audit, strikes=(*audit.strikes, strike)[-STRIKES_MAX:])


def _recent(turn: ControllerTurn) -> tuple[CorruptionStrike, ...]:
    since_ns = turn.now_ns - int(WINDOW_S * S_NS)
    return tuple(one for one in turn.state.audit.strikes if one.t_ns > since_ns)


def _answer(turn: ControllerTurn, audit_round: AuditRound, without: tuple[str, ...] = ()) -> None:
    """Let all ranks redo the phase, and remember the answer, which may be lost."""
    state = turn.state
    body = messages.AuditAgreed(
        generation=audit_round.generation,
        n=audit_round.n,
        again=audit_round.again,
        without=without,
    )
    state.audit = replace(state.audit, answered=body)
    if state.mode == "open":
        occupants = (state.occupant(rank) for rank in range(state.world))
        present = (each for each in occupants if each is not None and not each.killed_ns)
        turn.send_all(present, body)


def _tensors(verdict: AuditVerdict) -> str:
    more = f" and {verdict.more} more" if verdict.more else ""
    return ", ".join(verdict.tensors) + more
