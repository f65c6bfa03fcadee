"""Whether a simulated run has ended as it may, after what its plan did to it."""

from __future__ import annotations

from outlast.controller.inputs import EndRun
from outlast.testing.chaos import PATIENT, Plan
from outlast.testing.ledger import Ledger


def judge(plan: Plan, ledger: Ledger, end: EndRun) -> None:
    """A run is done, or one of its faults says why not; raises SimFailure otherwise."""
    if end.outcome == "done":
        if end.n != ledger.last:
            ledger.fail(f"done at phase {end.n} of {ledger.last}")
        return
    if plan.waits or plan.early:
        ledger.fail(
            f"{end.outcome}: {end.cause.detail if end.cause else ''}, which nothing asked for"
        )
    if end.cause is None:
        ledger.fail(f"{end.outcome} without a cause")
        return
    kinds = {what for _, what in plan.timed}
    if end.outcome == "interrupted" and "stop" not in kinds:
        ledger.fail("interrupted, though nobody asked")
    if end.outcome == "interrupted":
        return
    if end.cause.kind == "diverged" and plan.flips:
        return  # no majority, and no copy from before
    if end.cause.kind == "storage" and plan.policy.stop and plan.fails:
        return  # a save failed: its owner wants the end
    if "before its first step" in end.cause.detail:
        if end.cause.worker in ledger.stepped:
            ledger.fail(f"{end.cause.detail}: but it had made steps")
        return
    deeds = {strike.deed for strike in plan.strikes}
    accidents = deeds <= {"kill", "wait"} and kinds <= {"kill", "pair"} and plan.bug_at < 0
    if plan.attempts_max < PATIENT and not accidents:
        return
    if end.outcome == "user_error" and end.cause.n >= ledger.last:
        return  # it left badly after the run was done
    ledger.fail(f"{end.outcome}: {end.cause.detail}, though nothing kept it from going on")
