"""`outlast policy explain` and `outlast policy show`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
from msgspec.structs import replace

from outlast.cli.output_stream import Printer, echo, print_json, write
from outlast.controller.inputs import DecisionMade, ShardsHeld
from outlast.controller.member_tables import UnitRecord
from outlast.controller.recovery.rank_units import find_units
from outlast.controller.recovery.recovery_ladder import Situation, choose
from outlast.controller.recovery.recovery_policy import (
    NOTICE,
    PLANNED,
    Means,
    RecoveryPolicy,
    RungRule,
    class_of,
)
from outlast.errors import EXIT_DONE, UsageError
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Decided,
    Fault,
    PhaseDone,
    WorkerLost,
    WorkerSeated,
    WorkerWarm,
)
from outlast.launch.policies.policy_files import PRESETS, preset_text, read_policy
from outlast.launch.policies.policy_needs import JobShape, check_policy
from outlast.launch.run_journal import read_journal
from outlast.launch.torchrun_arguments import read_plan
from outlast.telemetry.event_store import read_events
from outlast.terminal_tables import table, text_column

# Failures in which all workers live on.
_ALIVE = ("transport", "unsettled", "storage", "raised", "controller_lost")
_BEHIND, _BEHIND_DISK = 5, 20  # committed steps since the copies of an imagined job
_SHOWN_MAX = 8  # units


class PolicyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a policy to one failure. `case`: one | no-spare | no-replica | all."""

    failure: str  # its class
    case: str
    rung: str
    rule: str
    reason: str


class PolicyExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `policy`: the rules; `job`: what the answers are for."""

    version: int = 1
    policy: RecoveryPolicy
    digest: str
    job: str
    answers: list[PolicyAnswer]


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """State of a job. `behind`, `behind_disk`: committed steps since the newest copy of any
    place and on disk; None: there is none."""

    world: int
    spares: int
    respawns: int = 100
    behind: int | None
    behind_disk: int | None
    in_memory: bool
    rungs: tuple[tuple[str, str, int], ...] = ()
    step_s: float = 0.0
    now_ns: int = 0
    units: tuple[tuple[int, ...], ...] = ()  # of ranks that leave together
    no_shrink: str = ""  # why none may leave
    text: str


def show(preset: str = "") -> int:
    """Print the file of a policy preset, or list the presets.

    The file can be changed, and given to `outlast run --policy FILE`.

    Parameters
    ----------
    preset
        Name of a preset (default: list them).
    """
    if not preset:
        for name in PRESETS:
            lines = takewhile(lambda line: line.startswith("#"), preset_text(name).splitlines())
            text = " ".join(line.removeprefix("# ") for line in lines)
            echo(f"{text.partition('. ')[0].rstrip('.')}.")
        return EXIT_DONE
    if preset not in PRESETS:
        read_policy(preset)  # its error names the presets
        raise UsageError(f"{preset} is a file, and no preset: print it with cat {preset}")
    write(preset_text(preset))
    return EXIT_DONE


def explain(
    run_dir: Path | None = None,
    *,
    policy: str = "",
    ranks: int = 4,
    spares: int = 1,
    json: bool = False,
) -> int:
    """Show the answer of a policy to each class of failure.

    The answers are those of the controller, for a job as it is now, or for an
    imagined one with copies in memory and checkpoints on disk.

    Parameters
    ----------
    run_dir
        Run directory, whose policy, spares, copies and spent budgets count (default: an
        imagined job).
    policy
        Preset or TOML file (default: that of the run, else default).
    ranks
        Number of ranks of the imagined job.
    spares
        Number of warm spares of the imagined job.
    json
        Print one JSON object instead of a table.
    """
    if run_dir is not None and run_dir.is_file():
        raise UsageError(
            f"{run_dir} is a file, and no run directory; a policy is given by --policy {run_dir}"
        )
    if run_dir is None:
        chosen = read_policy(policy or "default")
        job = _imagined(ranks, spares)
    else:
        plan = read_plan(run_dir).plan
        chosen = read_policy(policy) if policy else plan.policy
        on_disk, in_memory = plan.checkpoint_every != 0, plan.snapshot_every != 0
        check_policy(chosen, JobShape(plan.world, plan.spares, on_disk or in_memory, on_disk))
        events = read_events(run_dir)
        job = _of_run(events, plan.world, plan.limits.respawns_max, saves=plan.keeps_copies)
        if chosen.shrinks:
            job = _with_units(job, run_dir)
    answers = [one for failure in chosen.failures for one in _answers(chosen, failure, job)]
    if json:
        found = PolicyExplanation(
            policy=chosen, digest=chosen.digest, job=job.text, answers=answers
        )
        print_json(found)
        return EXIT_DONE
    _print(chosen, job, answers)
    return EXIT_DONE


def _imagined(ranks: int, spares: int) -> _Job:
    if ranks < 1 or spares < 0:
        raise UsageError(f"--ranks {ranks} --spares {spares}: at least 1 rank and 0 spares")
    text = (
        f"{ranks} ranks, {spares} warm spares, a copy in memory {_BEHIND} steps back, a checkpoint"
        f" on disk {_BEHIND_DISK} steps back"
    )
    return _Job(
        world=ranks,
        spares=spares,
        behind=_BEHIND,
        behind_disk=_BEHIND_DISK,
        in_memory=True,
        now_ns=time.time_ns(),
        text=text,
    )


def _of_run(events: Sequence[AnyEvent], world: int, respawns: int, *, saves: bool) -> _Job:
    """Return the job as the events describe it."""
    warm, seated = set[str](), set[str]()
    step, saved, step_s = 0, -1, 0.0
    rungs: list[tuple[str, str, int]] = []
    for event in events:
        match event:
            case WorkerWarm():
                warm.add(event.worker)
            case WorkerSeated():
                seated.add(event.worker)
            case WorkerLost():
                warm.discard(event.worker)
            case PhaseDone():
                step = max(step, event.step)
                if event.kind == "step":
                    step_s = (event.t_ns - event.t_begin_ns) / 1e9 / event.steps
            case CheckpointSaved():
                saved = event.step
            case Decided():
                rungs.append((event.rung, class_of(event.rule), event.t_ns))
            case _:
                pass
    spares = len(warm - seated)
    copies = "copies in memory" if saves or saved >= 0 else "no copy in memory"
    disk = f"a checkpoint of step {saved}" if saved >= 0 else "no checkpoint"
    behind_disk = max(0, step - saved) if saved >= 0 else None
    return _Job(
        world=world,
        spares=spares,
        respawns=respawns,
        behind=0 if saves else behind_disk,
        behind_disk=behind_disk,
        in_memory=saves or saved >= 0,
        rungs=tuple(rungs),
        step_s=step_s,
        now_ns=events[-1].t_ns if events else 0,
        text=f"{world} ranks at step {step}, {spares} warm spares, {disk}, {copies}",
    )


def _with_units(job: _Job, run_dir: Path) -> _Job:
    """Return the job with the units of ranks that leave together, as its journal has them."""
    record, shards = UnitRecord(), dict[int, bytes]()
    for entry in read_journal(run_dir / "journal", lambda _: None):
        record.restore(entry)
        if isinstance(entry, DecisionMade) and entry.verdict == "start":
            shards = {}
        elif isinstance(entry, ShardsHeld):
            shards[entry.seat] = entry.shards
    found, why = find_units(job.world, shards, record.uses)
    text = f"; no rank leaves: {why}" if why else ""
    if found.size > 1:
        shown = "; ".join(", ".join(map(str, unit)) for unit in found.units[:_SHOWN_MAX])
        more = (
            f"; and {len(found.units) - _SHOWN_MAX} more" if len(found.units) > _SHOWN_MAX else ""
        )
        text = f"; ranks that leave together: {shown}{more}{text}"
    return replace(job, units=found.units, no_shrink=why, text=job.text + text)


def _answers(policy: RecoveryPolicy, failure: str, job: _Job) -> list[PolicyAnswer]:
    cause, is_planned = _fault_of(policy, failure), failure in PLANNED
    lost = () if failure in _ALIVE else (0,)
    one = Situation(
        cause=cause,
        lost=lost,
        planned=(0,) if is_planned else (),
        move=failure if is_planned else NOTICE,
        donors=job.world - len(lost),
        spares=min(len(lost), job.spares),
        respawns=job.respawns,
        world=job.world,
        units=tuple(unit for unit in job.units if not set(lost).isdisjoint(unit)),
        no_shrink=job.no_shrink,
        steps_lost=job.behind or 0,
        checkpoint_n=1 if job.behind is not None else 0,
        in_memory=job.in_memory and job.behind is not None,
        disk_n=1 if job.behind_disk is not None else 0,
        disk_steps_lost=job.behind_disk or 0,
        means=Means(warm=job.spares, step_s=job.step_s, rungs=job.rungs, now_ns=job.now_ns),
    )
    seats = tuple(range(job.world))
    no_spare = replace(one, spares=0, means=replace(one.means, warm=0))
    no_shrink = job.no_shrink or "no replica is whole"
    no_replica = replace(one, unreplicated=lost, no_shrink=no_shrink)
    everybody = replace(one, lost=seats, planned=(), donors=0, spares=min(job.spares, job.world))
    cases = {"one": one}
    if lost:
        cases |= {"no-spare": no_spare, "no-replica": no_replica}
    cases["all"] = everybody
    if is_planned:
        return [_answer_to_plan(policy, one)]
    found = []
    for case, situation in cases.items():
        choice = choose(situation, policy)
        reason = choice.reason.replace(f" ({cause.kind}: )", "")
        found.append(
            PolicyAnswer(
                failure=failure, case=case, rung=choice.rung, rule=choice.rule, reason=reason
            )
        )
    return found


def _fault_of(policy: RecoveryPolicy, failure: str) -> Fault:
    codes = {name: code for code, name in policy.exit_classes.items()}
    if failure in codes:
        return Fault(kind="exited", detail="", seat=0, exit_code=codes[failure])
    return Fault(kind="requested" if failure in PLANNED else failure, detail="", seat=0)  # type: ignore[arg-type]


def _answer_to_plan(policy: RecoveryPolicy, one: Situation) -> PolicyAnswer:
    """Return whether ranks move for a notice, or a slow one does; else they stay, and for a notice
    the run saves, and ends before a deadline."""
    failure = one.move
    choice = choose(one, policy)
    if choice.rung == "migrate":
        rung, reason, rule = choice.rung, "ranks move between two steps", choice.rule
    else:
        is_named = policy.names("migrate", failure)
        why = "no warm spare fits" if is_named else f"policy {policy.name} has no rung migrate"
        rung, rule = "stay", choice.rule if is_named else f"policy {policy.name}, {failure}"
        then = "; the run saves, and ends before a deadline" if failure == NOTICE else ""
        reason = f"{why}: the ranks stay{then}"
    return PolicyAnswer(failure=failure, case="one", rung=rung, rule=rule, reason=reason)


def _print(policy: RecoveryPolicy, job: _Job, answers: list[PolicyAnswer]) -> None:
    echo(f"policy {policy.name} (digest {policy.digest}) for {job.text}")
    titles = {"one": "one rank", "no-spare": "no spare", "no-replica": "no replica", "all": "all"}
    grid = table(
        text_column("failure", wrap=False),
        *map(text_column, titles.values()),
        text_column("rungs in order"),
    )
    by_failure = {failure: dict[str, str]() for failure in policy.failures}
    for one in answers:
        by_failure[one.failure][one.case] = one.rung
    for failure, rungs in by_failure.items():
        rules = policy.rules(failure)
        order = "as default" if rules == policy.default else _order(rules)
        grid.add_row(failure, *(rungs.get(case, "") for case in titles), order)
    console = Printer()
    console.print(grid)
    echo(f"default: {_order(policy.default)}")
    for rung, budget in policy.budgets.items():
        what = " for findings of checks and drains of Slurm" if rung == "migrate" else ""
        echo(f"budget: {rung} at most {budget} times an hour{what}")
    for failure, budget in policy.failures_max.items():
        echo(f"budget: {failure} is recovered from at most {budget} times an hour")
    echo(
        f"repeats: {policy.repeats_max} workers of one rank an hour are replaced after one failure"
    )
    for code, failure in policy.exit_classes.items():
        echo(f"exit code {code}: {failure}")


def _order(rules: tuple[RungRule, ...]) -> str:
    return ", ".join(_rule_text(rule) for rule in rules)


def _rule_text(rule: RungRule) -> str:
    conditions = [
        f"{name} {getattr(rule, name):g}"
        for name in RungRule.__struct_fields__
        if name != "rung" and getattr(rule, name) is not None
    ]
    return f"{rule.rung} ({', '.join(conditions)})" if conditions else rule.rung
