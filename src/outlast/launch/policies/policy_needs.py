"""Needs of a policy: spares, copies and checkpoints of the job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outlast.controller.recovery.recovery_policy import (
    FAILURES,
    FROM_A_COPY,
    RecoveryPolicy,
    RungRule,
)
from outlast.errors import UsageError


class JobShape(NamedTuple):
    """Spares and saves that a job has."""

    world: int
    spares: int
    saves: bool  # checkpoints or copies at intervals
    on_disk: bool  # checkpoints at intervals


def check_policy(policy: RecoveryPolicy, job: JobShape) -> None:
    """Raise UsageError for a policy that names what the job cannot do."""
    if wrong := next(_impossible(policy, job), ""):
        raise UsageError(f"--policy {policy.name}: {wrong}; nothing was started")


def _impossible(policy: RecoveryPolicy, job: JobShape) -> Iterator[str]:
    for table in ("default", *policy.classes):
        rules = policy.rules(table)
        for rule in rules:
            yield from _unreachable(table, rule, job)
        rungs = {rule.rung for rule in rules} - {"stop"}
        if rungs == {"shrink"} and job.world == 1:
            yield (
                f"[{table}] answers failures by shrink alone, and of one rank none can leave; add"
                " respawn, or more ranks"
            )
        if rungs and rungs <= set(FROM_A_COPY) and not _is_overridden(table, policy):
            if not job.saves:
                yield (
                    f"[{table}] answers failures by {' and '.join(sorted(rungs))} alone, and this"
                    " job saves nothing, so that each failure would lose all steps; add"
                    " --checkpoint-every STEPS (or auto)"
                )
            elif rungs == {"restart"} and not job.on_disk:
                yield (
                    f"[{table}] restarts from checkpoints on disk alone, and this job writes none;"
                    " add --checkpoint-every STEPS (or auto), or name the rung rollback, which"
                    " starts from copies in memory"
                )


def _is_overridden(table: str, policy: RecoveryPolicy) -> bool:
    """Return whether every class of failure has a table, so that [default] is never used."""
    return table == "default" and set(policy.classes) >= set(FAILURES)


def _unreachable(table: str, rule: RungRule, job: JobShape) -> Iterator[str]:
    if rule.spares_min is not None and rule.spares_min > job.spares:
        yield (
            f"[{table}] {rule.rung} needs {rule.spares_min} warm spare(s) (spares_min), and this"
            f" job has {job.spares}; add --spares {rule.spares_min}, or lower spares_min"
        )
