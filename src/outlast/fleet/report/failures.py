"""The sections about failures: how jobs end, of what, how often, after how long."""

from __future__ import annotations

from functools import partial

import polars as pl

from outlast.fleet import attribution, mttf, outages, rates, sizes, states, swaps
from outlast.fleet.hosts import expanded
from outlast.fleet.report import of_outages, pictures
from outlast.fleet.report.sections import Column, Facts, Told, section
from outlast.fleet.survived_failures import survived_by_cause
from outlast.fleet.tables import DAY_NS
from outlast.symptoms.taxonomy import DOMAINS, TABLE
from outlast.text_formatting import plural

FEW = 10  # failures: with fewer, a rate is a guess
PER = "in a million GPU hours"
_DOMAINS = {
    row.symptom: ", ".join(one for one in DOMAINS if one in row.domains) for row in TABLE.values()
}
_WHO = {"": "more than one at once"}


def how_jobs_end(facts: Facts) -> Told:
    """Figure 3 of the paper."""
    found = states.states(facts.tables, facts.found).with_columns(
        of=pl.when("hw").then(pl.lit("infrastructure")).otherwise(pl.lit("other"))
    )
    columns = [
        Column("state", "state"), Column("of", "ended by"), Column("jobs", "attempts", "count"),
        Column("jobs_share", "of attempts", "share"),
        Column("gpu_hours", "GPU hours", "GPU hours"),
        Column("gpu_hours_share", "of GPU hours", "share"),
    ]  # fmt: skip
    backwards = int(found["backwards"].sum())
    notes = [f"{backwards:,} attempts end before they start: no time"] if backwards else []
    said = (
        "Attempts by the state that the scheduler gave them. Infrastructure ended those in"
        " NODE_FAIL or BOOT_FAIL, and others on whose nodes a check that takes the job away fired"
        f" within {attribution.BEFORE_S / 60:g} minutes before the end or"
        f" {attribution.AFTER_S / 60:g} after it."
    )
    told = section("states", "How jobs end", said, columns, found, notes)
    return Told(told, partial(pictures.states, found) if len(found) else None)


def of_what(facts: Facts) -> Told:
    """Figure 4 of the paper, and who can have caused each (Table I)."""
    if facts.by == "outages":
        return of_outages.of_what(facts)
    found = rates.by_cause(facts.tables, facts.found).with_columns(pl.col("^per_gpu_hour.*$") * 1e6)
    columns = [
        Column("cause", "cause"), Column("failures", "failures", "count"),
        Column("share", "share", "share"), Column("per_gpu_hour", PER, "rate"),
        Column("per_gpu_hour_low", "90 % from", "rate"),
        Column("per_gpu_hour_high", "to", "rate"), Column("domains", "can be caused by"),
    ]  # fmt: skip
    found = found.with_columns(domains=pl.col("cause").replace_strict(_DOMAINS, default=""))
    said = (
        "What was found on the nodes of attempts that infrastructure ended. One with several causes"
        " counts for each of them, and in the shares by parts. Intervals are those of independent"
        " failures (Gamma). Users, system software and hardware can cause what Table I of the paper"
        " says."
    )
    alone = int(found.filter(pl.col("cause") == attribution.UNATTRIBUTED)["failures"].sum())
    notes = [f"for {plural(alone, 'failure')} nothing was found on the nodes"] if alone else []
    notes += [*_diagnosis(facts.found.failures), *_strangers(facts)]
    drawn = found.drop_nulls("per_gpu_hour")
    told = section("causes", "What failures are of", said, columns, found, notes)
    return Told(told, partial(pictures.causes, found) if len(drawn) > 1 else None)


def _diagnosis(failures: pl.DataFrame) -> list[str]:
    """Who is left that can have caused all that was found of a failure."""
    told = failures.filter(pl.col("symptoms").list.len() > 0)
    if not len(told):
        return []
    left = told.group_by("domains").agg(n=pl.len()).sort("n", "domains", descending=[True, False])
    said = [
        f"{count:,} of {_WHO.get(domains, domains.replace('+', ' or '))}"
        for domains, count in left.iter_rows()
    ]
    many = plural(len(told), "failure")
    return [f"what was found leaves, of {many}, as cause: {', '.join(said)}"]


def _strangers(facts: Facts) -> list[str]:
    """Where most failures have no cause: whether findings and jobs speak of the same nodes at all.
    Accounting may say n1 where a kernel says n1.example.org."""
    failures = facts.found.failures
    with_cause = failures.filter(pl.col("symptoms").list.len() > 0).height
    if with_cause and 2 * with_cause >= len(failures):
        return []
    found = facts.tables.findings.select("cluster", "node").unique().collect()
    ran = expanded(facts.tables.jobs.select("cluster", "hosts").unique())
    ran = ran.select("cluster", "node").unique().collect()
    if not len(found) or not len(ran):
        return []
    many = plural(len(found), "node")
    said, known = found["node"].min(), ran["node"].min()
    if not len(found.join(ran, on="node", how="semi")):
        return [f"none of {many} with findings ran a job: are {said} and {known} written alike?"]
    theirs, ours = (set(each["cluster"]) for each in (found, ran))
    if "" not in theirs | ours and not theirs & ours:
        return [
            f"findings are of cluster {min(theirs)}, jobs of {min(ours)}: none is told of a job;"
            " --cluster names the cluster of a log"
        ]
    return []


def together(facts: Facts) -> Told:
    """Causes that come in pairs."""
    found = attribution.cooccurring(facts.found).sort("together", descending=True)
    columns = [
        Column("cause", "cause"), Column("other", "with"), Column("together", "both", "count"),
        Column("failures", "of failures", "count"), Column("share", "share", "share"),
    ]  # fmt: skip
    said = "Symptoms that were found for the same failure: two names, perhaps one fault."
    return Told(section("together", "What is found together", said, columns, found))


def over_time(facts: Facts) -> Told:
    """Figure 5 of the paper."""
    whole_days = (facts.tables.until_ns - facts.tables.since_ns) // DAY_NS
    days = int(min(rates.ROLLING_DAYS, max(1, whole_days // 4)))
    if facts.by == "outages":
        return of_outages.over_time(facts, days)
    found = rates.rolling(facts.tables, facts.found, days=days)
    new = rates.introduced(facts.tables, facts.found, days=days)
    columns = [
        Column("check", "new check"), Column("symptom", "finds"), Column("day", "since", "day"),
        Column("before", "before", "rate"), Column("after", "after", "rate"),
    ]  # fmt: skip
    swing = rates.swing(found)
    said = (
        "Failures in 1000 node-days of jobs on GPUs (of all, where none has one), over the"
        f" {days} days up to each day. A new check makes failures visible that were there before:"
        " the table has what it finds, before and after it came."
    )
    notes = [f"the highest rate is {swing:.1f} times the lowest"] if swing else []
    told = section("rolling", "How rates change", said, columns, new, notes, series=found)
    drawn = found.drop_nulls("per_1000_node_days")
    return Told(told, partial(pictures.rolling, found, new) if len(drawn) > 1 else None)


def how_large(facts: Facts) -> Told:
    """Figure 6 of the paper."""
    found = sizes.sizes(facts.tables)
    columns = [
        Column("gpus", "GPUs, up to", "count"), Column("jobs", "attempts", "count"),
        Column("jobs_share", "of attempts", "share"),
        Column("gpu_hours", "GPU hours", "GPU hours"),
        Column("gpu_hours_share", "of GPU hours", "share"),
        Column("gpu_hours_from", "of that so large or larger", "share"),
    ]  # fmt: skip
    said = "Attempts that started, by GPUs rounded up to a power of two."
    told = section("sizes", "How large jobs are", said, columns, found)
    return Told(told, partial(pictures.sizes, found) if len(found) else None)


def how_long(facts: Facts) -> Told:
    """Figure 7 of the paper."""
    found = mttf.mttf(facts.tables, facts.found)
    columns = [
        Column("gpus", "GPUs, up to", "count"), Column("attempts", "attempts", "count"),
        Column("failures", "failures", "count"), Column("mttf_h", "MTTF, h", "hours"),
        Column("low_h", "90 % from", "hours"), Column("high_h", "to", "hours"),
        Column("boot_low_h", "resampled from", "hours"), Column("boot_high_h", "to", "hours"),
        Column("clusters", "by"), Column("dispersion", "dispersion", "times"),
        Column("projected_h", "1/N says, h", "hours"),
    ]  # fmt: skip
    rate = facts.rate
    said = (
        "Running time over failures by infrastructure, by size in whole nodes. Two 90 % intervals:"
        " of independent failures (Gamma, failures + 1/2), and by drawing days or job runs anew,"
        " which is the wider the more failures come in bursts (dispersion above 1). 1/N: what the"
        f" failure rate of jobs above {rate.above_gpus:,} GPUs says of each size."
    )
    notes = [_of_large(rate)] if rate.boot_low is not None and rate.boot_high is not None else []
    if rate.failures < FEW:
        notes.append(
            f"{plural(rate.failures, 'failure')} of jobs above {rate.above_gpus:,} GPUs: too few"
            " to project from"
        )
    told = section("mttf", "How long jobs run", said, columns, found, notes)
    drawn = found.filter(pl.col("gpus") > 0, pl.col("mttf_h") > 0)
    return Told(told, partial(pictures.mttf, found, rate) if len(drawn) else None)


def _of_large(rate: mttf.FailureRate) -> str:
    return (
        f"r_f of jobs above {rate.above_gpus:,} GPUs: {rate.per_1000_node_days:.2f} failures in"
        f" 1000 node-days, {rate.low:.2f} to {rate.high:.2f} if they were independent,"
        f" {rate.boot_low:.2f} to {rate.boot_high:.2f} by drawing {rate.clusters} anew; dispersion"
        f" {rate.dispersion:.2f}: as sure as {rate.sure_as:.0f} independent failures"
    )


def survived(facts: Facts) -> Told:
    """Failures after which the job went on, which no figure that rests on accounting counts."""
    found = survived_by_cause(facts.tables)
    columns = [
        Column("cause", "cause"), Column("rung", "recovered by"),
        Column("failures", "failures", "count"), Column("nodes", "on nodes", "count"),
        Column("lost_nodes", "took the node", "count"), Column("pause_s", "pause, s", "times"),
    ]  # fmt: skip
    said = (
        "Failures that runs of `outlast run` survived. The attempt went on, so that accounting does"
        " not show them. The pause lasts until every rank has committed the interrupted step."
    )
    notes = uncounted(facts)
    return Told(section("survived", "What jobs survived", said, columns, found, notes))


def uncounted(facts: Facts) -> list[str]:
    """Return a note where figures that rest on ended attempts leave survived failures out."""
    many = int(survived_by_cause(facts.tables)["failures"].sum())
    if not many:
        return []
    return [
        f"{plural(many, 'failure')} that jobs survived: r_f, MTTF, causes and lemons count ended"
        " attempts and leave these out; `outlast fleet fit` counts both"
    ]


def away(facts: Facts) -> Told:
    """Nodes that no job could have, and parts that were exchanged."""
    out, back = outages.outage_rate(facts.tables), outages.repair_time(facts.tables)
    swapped = swaps.swaps(facts.tables)
    notes = []
    if out.outages:
        if out.per_1000_node_days is not None:
            notes.append(
                f"{plural(out.outages, 'outage')} of {plural(out.nodes, 'node')}:"
                f" {out.per_1000_node_days:.2f} in 1000 node-days ({out.low:.2f} to"
                f" {out.high:.2f} with 90 %, if they were independent)"
            )
        if out.per_node_variance is not None:
            notes.append(
                f"variance over mean of outages by node: {out.per_node_variance:.2f} (1 if every"
                " node were as likely)"
            )
        if back.mean_s is not None:
            notes.append(f"a node is away for {back.mean_s / 3600:.1f} hours on the average")
    columns = [
        Column("part", "part"), Column("swaps", "exchanged", "count"),
        Column("nodes", "on nodes", "count"),
        Column("per_1000_node_days", "in 1000 node-days", "rate"),
        Column("per_1000_node_days_low", "90 % from", "rate"),
        Column("per_1000_node_days_high", "to", "rate"),
    ]  # fmt: skip
    said = "Times in which no job could have a node, and parts that were exchanged."
    return Told(section("repairs", "Nodes away, parts exchanged", said, columns, swapped, notes))
