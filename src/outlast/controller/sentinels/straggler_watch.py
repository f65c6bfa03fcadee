"""Slow ranks: their findings, the price of a move, and whether a move has helped.

| a rank | finding | what follows |
|---|---|---|
| is slow | `warn` | nothing: it may pass |
| has made all ranks wait as long as a move takes | `drain` | a planned move, by the policy |
| is slow again from its new worker's first steps | `warn` | none: its work is larger |
| is as fast as its peers again | `healthy` | the loss is forgotten |

To act when the loss has reached the price costs at most twice what the best choice would have cost,
however long the rank would have stayed slow.
"""

from __future__ import annotations

from msgspec.structs import replace

from outlast.controller import planned_migration
from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn, WorkerRecord
from outlast.controller.member_tables import AgentRecord
from outlast.controller.recovery.recovery_policy import STRAGGLER
from outlast.controller.sentinels.straggler_detection import REST, WARM_STEPS, SuspectedRank
from outlast.controller.sentinels.straggler_rows import (
    JUDGED_ROWS,
    ShownFinding,
    StragglerWatch,
    device_name,
    rank_of,
)
from outlast.events import Warned
from outlast.transport import messages

_GROWTH = 1.25  # of the loss, between two events
_NEW_WORKER_STEPS = 32  # in which a worker that is slow from its start is found
_UNEVEN_MIN = 0.10  # of the time of all steps
_UNEVEN_PRICES = 10  # waits for uneven work that are reported, in prices of a move


def note_stages(turn: ControllerTurn, worker: WorkerRecord, body: messages.StateProtected) -> None:
    """Record which ranks do the same work."""
    turn.state.stragglers.note_stages(worker.seat, body.stages)


def record_own_times(turn: ControllerTurn, agent: AgentRecord, body: messages.Renew) -> None:
    """Take the own times of an agent's ranks, and judge the rows that are complete with them."""
    state, watch = turn.state, turn.state.stragglers
    if not body.own_times or state.mode != "open":
        return
    if watch.generation != state.generation:
        _begin_generation(turn)
    present, rows = state.world - len(state.progress.absent), 0
    for name, records in body.own_times.items():
        worker = state.members.workers.get(name)
        if worker is None or worker.agent != agent.name or worker.seat < 0 or worker.killed_ns:
            continue
        for one in records:
            row = watch.add(worker.seat, one, present)
            if row is not None:
                watch.observe(row)
                rows += 1
    if rows:
        _judge_moves(turn)
        _report_ranks(turn)
        _report_collectives(turn)
        _report_uneven_work(turn)


def price_s(state: ControllerState) -> float:
    """Return the wait of all ranks for a slow one at which it moves."""
    return max(state.limits.straggler_wait_s, state.stragglers.move_s)


def _begin_generation(turn: ControllerTurn) -> None:
    """Begin to compare anew. What a rank has cost stays its own while it has the same worker."""
    state, watch = turn.state, turn.state.stragglers
    moves = [(key, t_ns) for key, (_, t_ns) in state.findings.moves.items()]
    is_later = watch.generation > 0  # else these are moves of an earlier term
    kept = {
        rank: watch.lost_s(rank)
        for rank, one in watch.shown.items()
        if rank != REST and (worker := state.occupant(rank)) and worker.name == one.worker
    }
    for rank in watch.find_moves(moves):
        if is_later:
            watch.measure_move((turn.now_ns - watch.moved[rank].t_ns) / S_NS)
    watch.begin(state.generation)
    watch.carry(kept)
    _report_ranks(turn)
    if REST in watch.shown:
        _end_collectives(turn)


def _judge_moves(turn: ControllerTurn) -> None:
    """Report whether moves have helped."""
    watch = turn.state.stragglers
    for rank in tuple(watch.moved):
        one = watch.record.slow.get(rank)
        worker = turn.state.occupant(rank)
        if worker is None:
            continue
        if one is not None and one.since <= watch.record.begun + WARM_STEPS + _NEW_WORKER_STEPS:
            before = watch.judge(rank, is_work=True)
            was = f"{1 + before.excess:.2f} times before the move and " if before.excess else ""
            turn.note(
                f"straggler: rank {rank} takes {was}{1 + one.excess:.2f} times as long as its peers"
                f" with its new worker on {_host(turn.state, worker)}: its work is larger, no"
                " machine is slow; it does not move again",
                *(worker.name, rank),
            )
        elif watch.rows >= JUDGED_ROWS or one is not None:
            before = watch.judge(rank, is_work=False)
            was = f" from {before.host}" if before.host else ""
            now = watch.record.spread.excess.get(rank)
            text = f", {1 + now:.2f} times as long as its peers now" if now is not None else ""
            if before.excess and now is not None:
                text += f", {1 + before.excess:.2f} times before"
            turn.note(
                f"straggler: the move of rank {rank}{was} to {_host(turn.state, worker)} has"
                f" helped{text}",
                *(worker.name, rank),
                level="info",
            )


def _report_ranks(turn: ControllerTurn) -> None:
    """Bring the findings about slow ranks up to date."""
    state, watch = turn.state, turn.state.stragglers
    slow = {rank: one for rank, one in watch.record.slow.items() if rank != REST}
    if not slow and not any(one.check == STRAGGLER for one in state.findings.warned.values()):
        return
    found: dict[str, list[Warned]] = {}
    for rank, one in slow.items():
        if (worker := state.occupant(rank)) is not None:
            found.setdefault(worker.agent, []).append(_show(turn, rank, worker, one))
    for one in tuple(state.findings.warned.values()):
        rank = rank_of(one)
        if one.check != STRAGGLER or rank in slow:
            continue
        agent = next((a.name for a in state.members.agents.values() if a.host == one.host), "")
        if rank in watch.carried_s and watch.rows < JUDGED_ROWS:
            found.setdefault(agent, []).append(one)  # not compared for long enough
        else:
            found.setdefault(agent, [])
            if rank in watch.shown:
                watch.hide(rank)
    for name, findings in found.items():
        if agent := state.members.agents.get(name):
            body = messages.NodeChecked(found=tuple(findings), completed=(STRAGGLER,))
            planned_migration.record_findings(turn, agent, body)


def _show(turn: ControllerTurn, rank: int, worker: WorkerRecord, one: SuspectedRank) -> Warned:
    """Return the finding about a slow rank; write an event where its loss has grown."""
    state, watch = turn.state, turn.state.stragglers
    lost_s, price = watch.lost_s(rank), price_s(state)
    is_due = lost_s >= price and rank not in watch.work
    finding = Warned(
        t_ns=turn.now_ns,
        host=_host(state, worker),
        check=STRAGGLER,
        symptom="other",
        severity="drain" if is_due else "warn",
        code="slow",
        device=device_name(rank),
        detail=_detail(watch, rank, one, lost_s, price),
        worker=worker.name,
        lost_s=lost_s,
    )
    shown = watch.shown.get(rank)
    is_same = shown is not None and (shown.severity, shown.worker) == (
        finding.severity,
        worker.name,
    )
    if shown is None or not is_same or lost_s >= _GROWTH * shown.lost_s:
        if is_same:  # else record_findings does
            turn.emit(finding)
        excess, severity = one.excess, finding.severity
        watch.show(
            rank,
            ShownFinding(worker=worker.name, excess=excess, lost_s=lost_s, severity=severity),
        )
    return finding


def _detail(
    watch: StragglerWatch, rank: int, one: SuspectedRank, lost_s: float, price: float
) -> str:
    kind = watch.stages.get(rank, ())
    peers = sum(watch.stages.get(other, ()) == kind for other in watch.base) - 1
    where = "before its phase (script, data)" if one.is_before else "in its phase"
    text = (
        f"{one.own_s:.3g} s of its own a step, {1 + one.excess:.2f} times the {one.peers_s:.3g} s"
        f" of its {peers} peer(s), since step {one.since}, most of it {where};"
        f" confidence {one.confidence:.4f}; all ranks have waited {lost_s:.1f} s for it"
    )
    if rank in watch.work:
        return f"{text}; as slow with another worker: its work is larger"
    return f"{text}, and it moves at {price:.3g} s"


def _report_collectives(turn: ControllerTurn) -> None:
    """Report that no rank, but the rest of the steps has become slow, once that has cost much."""
    state, watch = turn.state, turn.state.stragglers
    one, shown = watch.record.slow.get(REST), watch.shown.get(REST)
    if one is None:
        if shown is not None:
            _end_collectives(turn)
        return
    if one.lost_s < price_s(state) or (shown and one.lost_s < _GROWTH * shown.lost_s):
        return
    watch.show(REST, ShownFinding(excess=one.excess, lost_s=one.lost_s))
    turn.emit(
        replace(
            _COLLECTIVES,
            t_ns=turn.now_ns,
            lost_s=one.lost_s,
            detail=f"{one.own_s:.3g} s of a step is no rank's own work, against {one.peers_s:.3g} s"
            f" before, since step {one.since}: collectives have become slow, and no rank is to"
            f" blame; all ranks have waited {one.lost_s:.1f} s longer; look for a link or a switch",
        )
    )


_COLLECTIVES = Warned(
    t_ns=0,
    host="",
    check=STRAGGLER,
    symptom="other",
    severity="warn",
    code="slow collectives",
    device="",
    detail="",
)


def _end_collectives(turn: ControllerTurn) -> None:
    lost_s = turn.state.stragglers.hide(REST).lost_s
    healthy = replace(_COLLECTIVES, severity="healthy", detail="no longer found")
    turn.emit(replace(healthy, t_ns=turn.now_ns, lost_s=lost_s))


def _report_uneven_work(turn: ControllerTurn) -> None:
    """Note once that ranks wait for each other in turn."""
    watch = turn.state.stragglers
    spread = watch.record.spread
    is_much = spread.uneven_s > _UNEVEN_PRICES * price_s(turn.state)
    if watch.is_uneven or not is_much or spread.uneven_s < _UNEVEN_MIN * spread.total_s:
        return
    watch.note_uneven()
    most = max(spread.tops, key=spread.tops.count)
    turn.note(
        f"straggler: {100 * spread.uneven_s / spread.total_s:.0f} % of the time of all ranks is a"
        f" wait for whichever rank has most to do (rank {most} in {spread.tops.count(most)} of the"
        f" newest {len(spread.tops)} samples): their work is uneven, and no machine is slow"
    )


def _host(state: ControllerState, worker: WorkerRecord) -> str:
    agent = state.members.agents.get(worker.agent)
    return agent.host if agent else ""
