"""Updates of save intervals during a run.

Seat 0 proposes them at its next save, where all ranks agree on them, so that they change on all
ranks at once.
"""

from __future__ import annotations

from msgspec.structs import replace

from outlast import events
from outlast.config import AUTO
from outlast.controller.controller_state import S_NS, ControllerState, ControllerTurn
from outlast.controller.recovery.deputies import rank_0
from outlast.controller.save_schedule.save_intervals import NEVER_S, Schedule, decide, explain
from outlast.controller.save_schedule.save_tiers import (
    IntervalBounds,
    Name,
    RunMeasurements,
    SaveCosts,
    SavePolicy,
    SaveTier,
    ScheduleInputs,
)
from outlast.transport import messages

AGAIN_S = 10.0  # minimum time between decisions caused by measurements only
DISK_MIN_S = 10.0  # covers the unmeasured costs of reading back, upload and deletion


def begin_measurements(turn: ControllerTurn) -> None:
    """Begin the measurements of this term."""
    turn.state.intervals.measured = RunMeasurements(since_ns=turn.now_ns)


def record_save(turn: ControllerTurn, body: messages.Checkpointed) -> None:
    """Record a measured save, which may change the intervals."""
    state = turn.state
    if not state.policy.auto:
        return
    state.intervals.measured = _with(state.intervals.measured, body)
    due_ns = state.intervals.scheduled_ns + int(AGAIN_S * S_NS)
    if state.intervals.schedule is None or turn.now_ns >= due_ns:
        _schedule(turn)
    send_intervals(turn)


def record_restart(turn: ControllerTurn) -> None:
    """Record a restart, a failure that undoes work."""
    measurements = turn.state.intervals.measured
    turn.state.intervals.measured = replace(
        measurements, failures=measurements.failures + 1, restoring="", restoring_ns=turn.now_ns
    )


def record_found(turn: ControllerTurn) -> None:
    """Record the tier that a restart restores from; a later search replaces it."""
    state = turn.state
    measurements = state.intervals.measured
    if not measurements.restoring_ns:
        return  # nothing has failed
    tier = state.saves.checkpoint.tier if state.saves.checkpoint else ""
    state.intervals.measured = replace(
        measurements,
        restoring=tier,
        from_memory=measurements.from_memory
        + (tier == "memory")
        - (measurements.restoring == "memory"),
        from_disk=measurements.from_disk + (tier == "disk") - (measurements.restoring == "disk"),
    )


def record_opened(turn: ControllerTurn) -> None:
    """Record the cost of a restore once a generation opens, and send seat 0 its intervals."""
    state = turn.state
    measurements = state.intervals.measured
    if measurements.restoring_ns and state.progress.first:
        restore_s = (turn.now_ns - measurements.restoring_ns) / S_NS
        if measurements.restoring == "memory":
            measurements = replace(measurements, memory=measurements.memory.restored(restore_s))
        elif measurements.restoring == "disk":
            measurements = replace(measurements, disk=measurements.disk.restored(restore_s))
        state.intervals.measured = replace(measurements, restoring="", restoring_ns=0)
        if state.intervals.schedule is not None:
            _schedule(turn)
    send_intervals(turn)


def send_intervals(turn: ControllerTurn, *, again: bool = False) -> None:
    """Send new intervals to the worker of rank 0, or of its deputy; `again`: repeat them, since a
    frame may be lost."""
    state = turn.state
    intervals = state.intervals
    worker = state.occupant(rank_0(state))
    if intervals.schedule is None or worker is None or worker.hello is None or worker.killed_ns:
        return
    memory, disk = _intervals(intervals.schedule, state.policy)
    if again or intervals.announced != (worker.name, memory, disk):
        intervals.announced = (worker.name, memory, disk)
        turn.send(worker, messages.SaveEvery(memory=memory, disk=disk))


def _with(measurements: RunMeasurements, body: messages.Checkpointed) -> RunMeasurements:
    """Return the measurements after a save. A checkpoint's cost includes its copy in memory, even
    if that copy was due anyway, since a checkpoint always needs it."""
    step = measurements.step.add(body.step_s) if body.step_s else measurements.step
    memory = measurements.memory
    disk = measurements.disk
    if body.tier == "memory" and body.blocking_s:
        memory = memory.saved(blocking_s=body.blocking_s)
    elif body.tier == "disk" and body.blocking_s:
        disk = disk.saved(blocking_s=body.blocking_s, flush_s=body.flush_s, drag_s=body.drag_s)
    return replace(measurements, step=step, memory=memory, disk=disk)


def _schedule(turn: ControllerTurn) -> None:
    """Decide intervals once all tiers with AUTO intervals are measured; emit changes."""
    state = turn.state
    intervals = state.intervals
    policy = state.policy
    measurements = intervals.measured
    unknown = (policy.memory == AUTO and not measurements.memory.measured) or (
        policy.disk == AUTO and not measurements.disk.measured
    )
    if unknown or not measurements.step.values:
        return
    facts = _facts(state, turn.now_ns)
    before = intervals.schedule
    schedule = decide(facts, before)
    intervals.schedule = schedule
    intervals.scheduled_ns = turn.now_ns
    memory, disk = _intervals(schedule, policy)
    if before is None or _intervals(before, policy) != (memory, disk):
        why = "\n".join([explain(schedule, facts), *_fixed(policy)])
        turn.emit(events.Scheduled(t_ns=turn.now_ns, memory=memory, disk=disk, why=why))


def _facts(state: ControllerState, now_ns: int) -> ScheduleInputs:
    policy = state.policy
    measurements = state.intervals.measured
    tiers: list[SaveTier] = []
    if policy.memory:
        tiers.append(_tier("memory", policy.memory, measurements.memory, measurements.from_memory))
    if policy.disk:
        # A checkpoint's own copy in memory counts as the checkpoint.
        restored = measurements.from_disk + (0 if policy.memory else measurements.from_memory)
        survives = 1.0 if policy.durable else None
        tiers.append(_tier("local", policy.disk, measurements.disk, restored, survives))
    return ScheduleInputs(
        step=measurements.step,
        devices=state.world,
        failures=measurements.failures,
        exposure_device_s=state.world * max(1.0, (now_ns - measurements.since_ns) / S_NS),
        tiers=tuple(tiers),
    )


def _tier(
    name: Name, every: int, costs: SaveCosts, restored: int, survives: float | None = None
) -> SaveTier:
    bounds = IntervalBounds(min_steps=every, max_steps=every, max_s=NEVER_S)
    if every == AUTO:
        bounds = IntervalBounds(min_s=DISK_MIN_S if name == "local" else 0.0)
    return SaveTier(name=name, costs=costs, bounds=bounds, restored=restored, survives=survives)


def _intervals(schedule: Schedule, policy: SavePolicy) -> tuple[int, int]:
    """Return the steps between copies in memory and between checkpoints; fixed ones stay."""
    chosen = {one.tier: one.every_steps for one in schedule.choices}
    return (
        chosen["memory"] if policy.memory == AUTO else policy.memory,
        chosen["local"] if policy.disk == AUTO else policy.disk,
    )


def _fixed(policy: SavePolicy) -> list[str]:
    """Return one text for each interval that a flag fixes."""
    flags = (("--snapshot-every", policy.memory), ("--checkpoint-every", policy.disk))
    return [f"fixed by {flag} {steps}" for flag, steps in flags if steps != AUTO]
