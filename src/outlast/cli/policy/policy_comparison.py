"""`outlast policy try`: the cost of policies on recorded or simulated failures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from outlast import quantities
from outlast.cli.output_stream import Printer, echo, print_json
from outlast.controller.recovery.recovery_policy import DEFAULT, RecoveryPolicy
from outlast.errors import EXIT_DONE, UsageError
from outlast.launch.policies.policy_files import read_policy
from outlast.plan.answers.policy_trial import (
    PolicyTrial,
    measure,
    try_on_scenario,
    try_on_schedule,
)
from outlast.telemetry.event_store import read_events
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration

REPLICATIONS_MAX = 1000
SPARES_MAX = 1024
UNITS = (
    "a replica spans nodes: its ranks would leave together in a run, which is not simulated here;"
    " the rung shrink is passed"
)
REFILL_S = 5.0  # until a spare is warm again in place of one that took a rank


class PolicyComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `recorded_s`: from the first step of the run to its end, or time that
    the jobs of a lake ran; 0 of simulated failures. `assumed`: rungs whose time the run has not
    measured. `notes`: what was left out of a lake."""

    version: int = 1
    of: Literal["run", "lake", "scenario"]
    source: str
    recorded_s: float
    assumed: tuple[str, ...]
    notes: list[str] = []
    trials: list[PolicyTrial]


def try_policies(
    *,
    run: Path | None = None,
    lake: Path | None = None,
    simulate: Path | None = None,
    policy: Annotated[list[str] | None, Parameter(negative="")] = None,
    price: str = "",
    spares: int | None = None,
    cluster: str | None = None,
    replications: int = 5,
    seed: int = 0,
    json: bool = False,
) -> int:
    """Compute the cost of policies on recorded or simulated failures.

    The real controller decides on each failure. Failures of a run come at their
    times after its first step; steps, saves and recoveries take as long as the run
    has measured, or as the scenario has them. Failures of a lake are those of its
    largest jobs, each at its time.

    Parameters
    ----------
    run
        Run directory whose failures are answered again.
    lake
        Lake of `outlast fleet ingest`, whose jobs' failures are answered again; the default policy
        is tried beside the others.
    simulate
        Scenario of `outlast plan` as a TOML file, whose failures are drawn; with --lake: for the
        costs of jobs that have measured none.
    policy
        Preset or TOML file (default: default). Repeatable.
    price
        Price of a rank for an hour, as in $2.50, with --run and --lake (a scenario has its own).
    spares
        Number of spares of each job, with --lake (default: 1 where a spare took a rank, else 0;
        those of the scenario for jobs that have measured nothing).
    cluster
        Name of the cluster, where the lake holds several.
    replications
        Number of simulated runs for each policy, with --simulate.
    seed
        Random seed of the simulated failures.
    json
        Print one JSON object instead of a table.
    """
    if [run, lake or simulate].count(None) != 1:
        raise UsageError("give either --run RUN_DIR, --lake LAKE or --simulate SCENARIO.toml")
    if lake is None and (spares is not None or cluster is not None):
        raise UsageError("--spares and --cluster are for --lake")
    policies = [read_policy(text) for text in policy or [DEFAULT.name]]
    if run is not None:
        usd = quantities.price(f"--price {price}", price) if price else None
        found = _on_run(run, policies, usd)
    elif lake is not None:
        found = _on_lake(lake, policies, simulate, price, spares, cluster)
    else:
        assert simulate is not None
        if price:
            raise UsageError("--price is for --run; a scenario has its gpu-hour")
        found = _on_scenario(simulate, policies, replications, seed)
    if json:
        print_json(found)
    else:
        _print(found)
    return EXIT_DONE


def _on_run(
    run_dir: Path, policies: list[RecoveryPolicy], usd_per_rank_hour: float | None
) -> PolicyComparison:
    events = read_events(run_dir)
    measured = measure(events)
    first_ns = events[0].t_ns + int(measured.start_s * 1e9)
    failures = len(measured.failures)
    return PolicyComparison(
        of="run",
        source=f"{run_dir}: {failures} failure(s), {measured.steps} steps of"
        f" {duration(measured.step_s)}, {measured.world} ranks, {measured.spares} spares",
        recorded_s=(events[-1].t_ns - first_ns) / 1e9,
        assumed=measured.assumed,
        trials=[
            try_on_schedule(measured, each, refill_s=REFILL_S, usd_per_rank_hour=usd_per_rank_hour)
            for each in policies
        ],
    )


def _on_lake(
    path: Path,
    policies: list[RecoveryPolicy],
    simulate: Path | None,
    price: str,
    spares: int | None,
    cluster: str | None,
) -> PolicyComparison:
    from outlast.cli.policy.lake_failures import describe, read_jobs, try_on_lake
    from outlast.plan.model.scenario import scenario_of

    if spares is not None and not 0 <= spares <= SPARES_MAX:
        raise UsageError(f"--spares {spares}: from 0 to {SPARES_MAX:,}")
    if price and simulate:
        raise UsageError("--price is not for --simulate: a scenario has its gpu-hour")
    scenario = scenario_of({}, simulate) if simulate else None
    usd = quantities.price(f"--price {price}", price) if price else None
    usd = scenario.usd_per_gpu_hour if scenario else usd
    found = read_jobs(path, scenario, spares=spares, cluster=cluster)
    known = {each.digest for each in policies}
    beside = [] if DEFAULT.digest in known else [DEFAULT]
    return PolicyComparison(
        of="lake",
        source=describe(found, path),
        recorded_s=sum(job.recorded_s for job in found.jobs),
        assumed=(),
        notes=found.notes,
        trials=[
            try_on_lake(found.jobs, each, refill_s=REFILL_S, usd_per_gpu_hour=usd)
            for each in (*policies, *beside)
        ],
    )


def _on_scenario(
    file: Path, policies: list[RecoveryPolicy], replications: int, seed: int
) -> PolicyComparison:
    from outlast.plan.model.scenario import scenario_of

    if not 1 <= replications <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    scenario = scenario_of({}, file)
    notes: list[str] = []
    if scenario.replicas < scenario.nodes and any(each.shrinks for each in policies):
        notes.append(UNITS)
    return PolicyComparison(
        of="scenario",
        source=f"{file}: {scenario.gpus:,} GPUs, {replications} simulated run(s) for each policy",
        recorded_s=0.0,
        assumed=(),
        notes=notes,
        trials=[
            try_on_scenario(scenario, each, replications=replications, seed=seed)
            for each in policies
        ],
    )


def _row(one: PolicyTrial) -> dict[str, str]:
    rungs = ", ".join(f"{count} {rung}" for rung, count in one.rungs.items()) or "none"
    band = f" ({duration(one.band_s[0])} to {duration(one.band_s[1])})" if one.band_s else ""
    is_done = one.outcome == "done"
    return {
        "policy": one.policy,
        "outcome": "" if is_done else f"{one.outcome}: {one.reason}",
        "time": f"{duration(one.ended_s)}{band}",
        "beyond work": duration(max(0.0, one.ended_s - one.work_s)) if is_done else "",
        "fewer ranks": duration(one.slow_s) if one.slow_s else "",
        "steps redone": f"{one.steps_redone:.0f}",
        "price": f"${one.cost_usd:,.2f}" if one.cost_usd is not None else "",
        "rungs": rungs,
    }


def _print(found: PolicyComparison) -> None:
    echo(found.source)
    rows = [_row(one) for one in found.trials]
    filled = [name for name in rows[0] if any(row[name] for row in rows)]
    texts = ("policy", "outcome", "rungs")
    columns = (
        text_column(name, wrap=name != "policy") if name in texts else number_column(name)
        for name in filled
    )
    grid = table(*columns)
    for row in rows:
        grid.add_row(*(row[name] for name in filled))
    console = Printer()
    console.print(grid)
    if found.recorded_s:
        what = "that the jobs ran" if found.of == "lake" else "from the first step to the end"
        echo(f"recorded: {duration(found.recorded_s)} {what}")
    if found.assumed:
        echo(
            f"not measured by this run, and taken from the nearest rung or from its start:"
            f" {', '.join(found.assumed)}"
        )
    for note in found.notes:
        echo(note)
    if "fewer ranks" in filled:
        echo(
            "fewer ranks: of the time beyond work, what absent ranks cost; it is assumed that ranks"
            " of this job can leave (docs/fewer-ranks.md)"
        )
