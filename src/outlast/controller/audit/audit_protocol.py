"""Audits: comparison of the digests of replicas, and actions on the verdict.

    reports of all ranks ─► equal ──────────────────────────────► AuditAgreed, newest agreement
                        └─► kinds differ ─► AuditAsk ─► names ─► gradients alone: redo (corruption)
                                                             ├─► minority: replace those ranks
                                                             └─► no majority: roll back, else stop

Ranks report after the first step of a generation, at the loop's end, every --audit-every steps what
votes do not compare, and when a vote shows that replicas differ (`again`). A round is dropped with
its generation, unless replicas are known to differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from outlast import events
from outlast.controller import checkpoint_tracking, inputs
from outlast.controller.audit import corruption
from outlast.controller.audit.audit_records import (
    OPTIONAL_KINDS,
    Agreement,
    AuditRound,
    AuditState,
    AuditVerdict,
    CopyBar,
    ReplicaDigests,
    judge,
)
from outlast.controller.controller_state import S_NS, ControllerTurn, WorkerRecord
from outlast.controller.recovery import incident_response
from outlast.transport import messages

ROUNDS_MAX = 8
REPLACED_MAX = 3  # replacements per rank; beyond, its host or the script is the cause


def on_report(turn: ControllerTurn, worker: WorkerRecord, body: messages.Audited) -> None:
    """Record one rank's digests; judge once all ranks have reported."""
    audit = turn.state.audit
    known = audit.whole if body.parts == 1 else audit.newest
    one = audit.rounds.get(body.n)
    if body.again:
        if audit.answered is not None and _is_answer(audit.answered, body):
            turn.send(worker, audit.answered)  # repeated report: the answer was lost
            return
    elif known is not None and body.n <= known.n and one is None:
        if body.parts == 1:  # likewise
            turn.send(worker, messages.AuditAgreed(generation=body.generation, n=body.n))
        return
    is_same = one is not None and one.generation == body.generation
    if one is not None and is_same and (one.again, -one.parts) > (body.again, -body.parts):
        return  # a round over all of the state, or a later one, replaced it
    if one is None or not is_same or (one.again, one.parts) != (body.again, body.parts):
        one = AuditRound(
            generation=body.generation,
            n=body.n,
            step=body.step,
            part=body.part,
            parts=body.parts,
            again=body.again,
            since=Agreement(body.since_n, body.since_step),
        )
        _forget(turn, body.n)
    _keep(turn, _with_report(one, worker.seat, body))
    reports = turn.state.reports
    if (body.n, worker.seat) not in reports.digests:
        reports.counts[body.n] = reports.counts.get(body.n, 0) + 1
    reports.digests[body.n, worker.seat] = ReplicaDigests(body.replica_set, body.kinds)
    _judge(turn, body.n)


def _is_answer(answer: messages.AuditAgreed, body: messages.Audited) -> bool:
    return (answer.generation, answer.n, answer.again) == (body.generation, body.n, body.again)


def _with_report(one: AuditRound, rank: int, body: messages.Audited) -> AuditRound:
    """Return the round with what one rank has reported besides its digests."""
    since = one.since
    if since is not None and body.since_n < since.n:
        since = Agreement(body.since_n, body.since_step)
    if since is not None and since.n < 0:
        since = None
    return replace(
        one,
        since=since,
        devices={**one.devices, rank: body.device} if body.device else one.devices,
        has_equal_gradients=one.has_equal_gradients or body.has_equal_gradients,
        repeats=one.repeats or body.repeats,
    )


def on_named(turn: ControllerTurn, worker: WorkerRecord, body: messages.AuditNamed) -> None:
    """Record the names and digests of one rank's state."""
    one = turn.state.audit.rounds.get(body.n)
    if one is None or worker.seat not in one.names_requested:
        return
    _keep(turn, replace(one, names={**one.names, worker.seat: body.names}))
    _judge(turn, body.n)


def record_copy(turn: ControllerTurn, copy: messages.Checkpointed) -> bool:
    """Record a complete copy. Return False if it is barred."""
    if turn.state.audit.is_barred(copy):
        return False
    turn.state.audit = turn.state.audit.with_copy(copy)
    return True


def begin_again(turn: ControllerTurn, n: int, step: int) -> None:
    """Void agreements beyond phase n, since all ranks start before phase n+1."""
    turn.state.audit = turn.state.audit.begun_again(n, step)
    _forget_all(turn)


def record_transfers(turn: ControllerTurn) -> None:
    """Record that joiners hold copies of their donors' state."""
    turn.state.audit = turn.state.audit.copied(turn.state.progress.transfers)


def conclude(turn: ControllerTurn) -> None:
    """Act on known differences when the generation has closed, with or without names."""
    if not turn.state.audit.rounds:
        return
    _act_on_requested(turn)
    turn.state.audit = replace(turn.state.audit, rounds={})
    _forget_all(turn)


def expire(turn: ControllerTurn) -> None:
    """Judge without the missing names once their deadline has passed."""
    due = due_ns(turn)
    if due and turn.now_ns >= due:
        _act_on_requested(turn)


def _act_on_requested(turn: ControllerTurn) -> None:
    for audit_round in tuple(turn.state.audit.rounds.values()):
        if audit_round.names_requested:
            _act(
                turn,
                audit_round,
                judge(
                    _digests(turn, audit_round.n),
                    audit_round.names,
                    turn.state.audit.origins,
                    may_ask=False,
                ),
            )


def due_ns(turn: ControllerTurn) -> int:
    """Return the deadline for requested names in nanoseconds; 0: none are requested."""
    requested = [
        audit_round.asked_ns
        for audit_round in turn.state.audit.rounds.values()
        if audit_round.names_requested
    ]
    return min(requested) + int(turn.state.limits.status_s * S_NS) if requested else 0


def _keep(turn: ControllerTurn, audit_round: AuditRound) -> None:
    rounds = {
        n: other
        for n, other in turn.state.audit.rounds.items()
        if other.generation == audit_round.generation
    }
    rounds[audit_round.n] = audit_round
    for n in sorted(rounds)[:-ROUNDS_MAX]:
        del rounds[n]
    for n in turn.state.audit.rounds.keys() - rounds.keys():
        _forget(turn, n)
    turn.state.audit = replace(turn.state.audit, rounds=rounds)


def _digests(turn: ControllerTurn, n: int) -> dict[int, ReplicaDigests]:
    """Return what the ranks have reported after phase n."""
    digests = turn.state.reports.digests
    return {rank: each for (phase, rank), each in digests.items() if phase == n}


def _forget(turn: ControllerTurn, n: int) -> None:
    reports = turn.state.reports
    if reports.counts.pop(n, 0):
        reports.digests = {key: each for key, each in reports.digests.items() if key[0] != n}


def _forget_all(turn: ControllerTurn) -> None:
    turn.state.reports.digests = {}
    turn.state.reports.counts = {}


def _drop(turn: ControllerTurn, audit_round: AuditRound) -> None:
    _forget(turn, audit_round.n)
    rounds = {n: other for n, other in turn.state.audit.rounds.items() if n != audit_round.n}
    turn.state.audit = replace(turn.state.audit, rounds=rounds)


def _judge(turn: ControllerTurn, n: int) -> None:
    state = turn.state
    if state.reports.counts.get(n, 0) < state.world - len(state.progress.absent):
        return
    one = state.audit.rounds[n]
    verdict = judge(_digests(turn, n), one.names, state.audit.origins)
    if verdict.outcome != "ask":
        _act(turn, one, verdict)
    elif not one.names_requested:
        _keep(turn, replace(one, names_requested=verdict.ask, asked_ns=turn.now_ns))
        for rank in verdict.ask:
            worker = state.occupant(rank)
            if worker is not None and not worker.killed_ns:
                ask = messages.AuditRequest(generation=one.generation, n=n, kinds=verdict.kinds)
                turn.send(worker, ask)


def _act(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    _drop(turn, audit_round)
    if audit_round.again and corruption.answer_dispute(turn, audit_round, verdict):
        return
    unnamed = set(verdict.tensors) <= set(OPTIONAL_KINDS)
    if verdict.outcome == "agreed":
        _agree(turn, audit_round, verdict)
    # A difference in optional kinds without names is left to the next audit.
    elif not (unnamed and len(audit_round.names) < len(audit_round.names_requested)):
        _part(turn, audit_round, verdict)


def _agree(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    state = turn.state
    state.audit = state.audit.agreed(
        Agreement(audit_round.n, audit_round.step, audit_round.part, audit_round.parts)
    )
    _tell(turn, audit_round, verdict)
    if audit_round.parts > 1:
        if audit_round.since is not None:
            state.audit = state.audit.covered(audit_round.since)
        return
    turn.journal(inputs.AuditAgreedEntry(n=audit_round.n, step=audit_round.step))
    if state.mode != "open":
        return
    occupants = (state.occupant(rank) for rank in range(state.world))
    turn.send_all(
        (worker for worker in occupants if worker is not None and not worker.killed_ns),
        messages.AuditAgreed(generation=audit_round.generation, n=audit_round.n),
    )


def _tell(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    turn.emit(
        events.ReplicasCompared(
            t_ns=turn.now_ns,
            generation=audit_round.generation,
            n=audit_round.n,
            step=audit_round.step,
            ranks=verdict.compared,
            part=audit_round.part,
            parts=audit_round.parts,
            since_step=audit_round.since.step if audit_round.since is not None else -1,
            minority=verdict.minority,
            majority=verdict.majority,
            decides=verdict.outcome != "no majority",
            tensors=verdict.tensors,
        )
    )


def _part(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    """Handle differing replicas: replace the minority, or close the generation undecided."""
    state = turn.state
    if not corruption.are_gradients(verdict):  # of these none was applied
        _bar(turn, audit_round, verdict)
    _tell(turn, audit_round, verdict)
    blamed = {rank: _recently_replaced(turn, rank) for rank in verdict.minority}
    often = [rank for rank, times in blamed.items() if len(times) >= REPLACED_MAX]
    if verdict.outcome == "minority" and state.audit.whole is not None and not often:
        _replace(turn, audit_round, verdict)
        return
    state.audit = replace(state.audit, undecided=True)
    why = "no majority of copies agrees"
    if state.audit.whole is None:
        why = (
            "they have never been found equal: state that differs by rank must be the"
            " rank's own (session.state, or an object given to protect), not a module's or an"
            " optimizer's; stages of a pipeline, and experts that one rank alone holds, are not"
            " supported unless they are sharded by fully_shard or parallelize_module"
        )
    elif often:
        why = (
            f"rank {often[0]} has been replaced for this {REPLACED_MAX} times within an hour: what"
            " makes it differ is its host or the script, not one process"
        )
    ranks = _ranks(verdict.majority + verdict.minority)
    detail = (
        f"{ranks} hold different bytes of {_tensors(verdict)} after step {audit_round.step}; {why}"
    )
    fault = events.Fault(
        kind="diverged", detail=detail, n=audit_round.n, step=audit_round.step, t_ns=turn.now_ns
    )
    incident_response.record_fault(turn, fault, "audit")


def _bar(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    """Bar the copies that were saved since the last agreement, or since the start without one.
    Votes may have found equal later what differs now. Equal state does not clear contributions,
    which are in it on all ranks alike: for these the last equal replay counts."""
    state = turn.state
    since_n = audit_round.since.n if audit_round.again and audit_round.since is not None else 0
    trusted_n = max(state.audit.trusted_n, since_n)
    if corruption.are_contributions(verdict):
        trusted_n = since_n or state.audit.start_n or 0
    bar = CopyBar(trusted_n, audit_round.generation)
    turn.journal(inputs.CopiesBarred(after_n=bar.after_n, generation=bar.generation))
    state.audit = state.audit.barred(bar)
    newest, on_disk = state.audit.newest_copy(), state.audit.newest_copy("disk")
    checkpoint_tracking.bar_copies(turn, newest, on_disk)


def _replace(turn: ControllerTurn, audit_round: AuditRound, verdict: AuditVerdict) -> None:
    state = turn.state
    corruption.record_strikes(turn, audit_round, verdict)
    blamed = dict(state.audit.blamed)
    for rank in verdict.minority:
        worker = state.occupant(rank)
        blamed[rank] = (*_recently_replaced(turn, rank), turn.now_ns)
        if worker is None:
            continue  # already lost
        whole = audit_round.since if audit_round.again else state.audit.whole
        detail = (
            f"rank {rank} does not hold what {_ranks(verdict.majority)} hold after step"
            f" {audit_round.step}: {_tensors(verdict)}"
        )
        if corruption.are_contributions(verdict):
            detail = corruption.contribution_text(rank, audit_round, verdict)
        if whole is not None and whole.step < audit_round.step - 1:
            detail += (
                f"; all were last equal after step {whole.step}, and steps since then may have used"
                " its gradients"
            )
        fault = replace(
            turn.blame(worker, "diverged", detail), n=audit_round.n, step=audit_round.step
        )
        incident_response.give_up(turn, worker, fault, "audit")
    state.audit = replace(state.audit, blamed=blamed)


def _recently_replaced(turn: ControllerTurn, rank: int) -> tuple[int, ...]:
    since_ns = turn.now_ns - int(corruption.WINDOW_S * S_NS)
    return tuple(t_ns for t_ns in turn.state.audit.blamed.get(rank, ()) if t_ns > since_ns)


def _tensors(verdict: AuditVerdict) -> str:
    more = f" and {verdict.more} more" if verdict.more else ""
    return ", ".join(verdict.tensors) + more


def _ranks(ranks: tuple[int, ...]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def restore_audits(turn: ControllerTurn, journal: Sequence[inputs.JournalEntry]) -> None:
    """Restore agreements, transfers and barred copies of earlier terms from the journal."""
    audit = AuditState()
    for entry in journal:
        match entry:
            case inputs.AuditAgreedEntry(n=n, step=step):
                audit = audit.agreed(Agreement(n, step))
            case inputs.CopiesBarred(after_n=after_n, generation=generation):
                audit = audit.barred(CopyBar(after_n, generation))
            case inputs.DecisionMade(verdict="start", n=n, step=step):
                audit = audit.begun_again(n, step)
            case inputs.Opened(transfers=transfers):
                audit = audit.copied(transfers)
            case inputs.CorruptionFound(strike=strike):
                audit = corruption.with_strike(audit, strike)
            case _:
                pass
    copy = turn.state.saves.checkpoint
    turn.state.audit = audit.with_copy(copy) if copy else audit
