"""Report sections about failures: final states, causes, error codes, rates, outages."""

from __future__ import annotations

from functools import partial

import polars as pl

from outlast.fleet.analysis import failure_attribution, failure_rates, job_runs, outages
from outlast.fleet.analysis.exposure import KEY, node_inventory, whole_days
from outlast.fleet.analysis.failure_attribution import CAUSES
from outlast.fleet.analysis.outages import survived_by_cause
from outlast.fleet.host_lists import explode_hosts
from outlast.fleet.record_tables import DAY_NS
from outlast.fleet.report import report_figures
from outlast.fleet.report.report_sections import (
    DrawnSection,
    ReportColumn,
    ReportFacts,
    make_section,
)
from outlast.log_records import DOMAINS, TAXONOMY
from outlast.node_logs.nvidia_errors import Action, PolicyEntry, shipped_policy
from outlast.text_formatting import plural


def outage_causes_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of outages by symptom."""
    table = outages.outages_by_symptom(facts.tables)
    columns = [
        ReportColumn("symptom", "symptom"),
        ReportColumn("outages", "outages", "count"),
        ReportColumn("nodes", "on nodes", "count"),
        ReportColumn("per_1000_node_days", "in 1000 node-days", "rate"),
        ReportColumn("per_1000_node_days_low", "90 % from", "rate"),
        ReportColumn("per_1000_node_days_high", "to", "rate"),
        ReportColumn("median_h", "median duration, h", "hours"),
    ]
    text = (
        "Causes of outages, as no job is known: outages that began, in 1000 days of a node being"
        " up. Intervals are those of independent outages (Gamma)."
    )
    return DrawnSection(make_section("causes", "Causes of failures", text, columns, table))


def outage_history_section(facts: ReportFacts, days: int) -> DrawnSection:
    """Return the section of outage rates over the `days` up to each day."""
    calendar = whole_days(outages.outages_by_day(facts.tables), facts.tables)
    rows = outages.rolling_outages(calendar, days).select(
        "day",
        "node_days",
        "per_1000_node_days",
        failures="outages",
        cause=pl.lit(failure_rates.ALL),
    )
    swing = failure_rates.swing(rows)
    text = (
        f"Outages in 1000 days of a node being up, over the {days} days up to each day, as no job"
        " is known."
    )
    notes = [f"the highest rate is {swing:.1f} times the lowest"] if swing else []
    new = pl.DataFrame(schema={"check": pl.String, "day": pl.Date})
    section = make_section("rolling", "How rates change", text, [], new.clear(), notes, series=rows)
    drawn = rows.drop_nulls("per_1000_node_days")
    return DrawnSection(
        section, partial(report_figures.draw_rate_history, rows, new) if len(drawn) > 1 else None
    )


FEW = 10  # failures: with fewer, a rate is unreliable
PER = "in a million GPU hours"
_DOMAINS = {key: ", ".join(d for d in DOMAINS if d in row.domains) for key, row in TAXONOMY.items()}
_WHO = {"": "more than one at once"}


def final_states_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of final states (figure 3 of the paper)."""
    table = job_runs.jobs_by_state(facts.tables, facts.found).with_columns(
        of=pl.when("hw").then(pl.lit("infrastructure")).otherwise(pl.lit("other"))
    )
    columns = [
        ReportColumn("state", "state"),
        ReportColumn("of", "ended by"),
        ReportColumn("jobs", "attempts", "count"),
        ReportColumn("jobs_share", "of attempts", "share"),
        ReportColumn("gpu_hours", "GPU hours", "GPU hours"),
        ReportColumn("gpu_hours_share", "of GPU hours", "share"),
    ]
    backwards = int(table["backwards"].sum())
    notes = [f"{backwards:,} attempts end before they start: no time"] if backwards else []
    text = (
        "Attempts by the state that the scheduler gave them. Infrastructure ended those in"
        " NODE_FAIL or BOOT_FAIL, and others on whose nodes a check that takes the job away fired"
        f" within {failure_attribution.BEFORE_S / 60:g} minutes before the end or"
        f" {failure_attribution.AFTER_S / 60:g} after it."
    )
    section = make_section("states", "How jobs end", text, columns, table, notes)
    return DrawnSection(section, partial(report_figures.draw_states, table) if len(table) else None)


def causes_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of causes (figure 4 of the paper) and their domains (Table I)."""
    if facts.by == "outages":
        return outage_causes_section(facts)
    table = failure_rates.rates_by_cause(facts.tables, facts.found).with_columns(
        pl.col("^per_gpu_hour.*$") * 1e6
    )
    columns = [
        ReportColumn("cause", "cause"),
        ReportColumn("failures", "failures", "count"),
        ReportColumn("share", "share", "share"),
        ReportColumn("per_gpu_hour", PER, "rate"),
        ReportColumn("per_gpu_hour_low", "90 % from", "rate"),
        ReportColumn("per_gpu_hour_high", "to", "rate"),
        ReportColumn("domains", "can be caused by"),
    ]
    table = table.with_columns(domains=pl.col("cause").replace_strict(_DOMAINS, default=""))
    text = (
        "Findings on the nodes of attempts that infrastructure ended. An attempt with several"
        " causes counts for each, and by parts in the shares. Intervals are those of independent"
        " failures (Gamma). The possible origins (user, system software, hardware) are those of"
        " Table I of the paper."
    )
    alone = int(table.filter(pl.col("cause") == failure_attribution.UNATTRIBUTED)["failures"].sum())
    notes = [f"for {plural(alone, 'failure')} the nodes have no finding"] if alone else []
    notes += [*_diagnosis_notes(facts.found.failures), *_name_mismatch_notes(facts)]
    drawn = table.drop_nulls("per_gpu_hour")
    section = make_section("causes", "Causes of failures", text, columns, table, notes)
    return DrawnSection(
        section, partial(report_figures.draw_causes, table) if len(drawn) > 1 else None
    )


def _diagnosis_notes(failures: pl.DataFrame) -> list[str]:
    """Return a note on the domains that can have caused all findings of a failure."""
    diagnosed = failures.filter(pl.col("symptoms").list.len() > 0)
    if not len(diagnosed):
        return []
    counts = (
        diagnosed.group_by("domains").agg(n=pl.len()).sort("n", "domains", descending=[True, False])
    )
    parts = [
        f"{count:,} of {_WHO.get(domains, domains.replace('+', ' or '))}"
        for domains, count in counts.iter_rows()
    ]
    total = plural(len(diagnosed), "failure")
    return [f"possible origins by the findings of {total}: {', '.join(parts)}"]


def _name_mismatch_notes(facts: ReportFacts) -> list[str]:
    """Return a note if most failures lack a cause since node or cluster names do not match."""
    failures = facts.found.failures
    with_cause = failures.filter(pl.col("symptoms").list.len() > 0).height
    if with_cause and 2 * with_cause >= len(failures):
        return []
    table = facts.tables.findings.select("cluster", "node").unique().collect()
    ran = explode_hosts(facts.tables.jobs.select("cluster", "hosts").unique())
    ran = ran.select("cluster", "node").unique().collect()
    if not len(table) or not len(ran):
        return []
    nodes = plural(len(table), "node")
    name, known = table["node"].min(), ran["node"].min()
    if not len(table.join(ran, on="node", how="semi")):
        return [f"none of {nodes} with findings ran a job: are {name} and {known} written alike?"]
    theirs, ours = (set(each["cluster"]) for each in (table, ran))
    if "" not in theirs | ours and not theirs & ours:
        return [
            f"findings are of cluster {min(theirs)}, jobs of {min(ours)}: none matches a job;"
            " --cluster names the cluster of a log"
        ]
    return []


def cooccurrence_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of causes that occur in pairs."""
    table = failure_attribution.cooccurring_causes(facts.found).sort("together", descending=True)
    columns = [
        ReportColumn("cause", "cause"),
        ReportColumn("other", "with"),
        ReportColumn("together", "both", "count"),
        ReportColumn("failures", "of failures", "count"),
        ReportColumn("share", "share", "share"),
    ]
    text = "Symptoms that were found for the same failure: two names, perhaps one fault."
    return DrawnSection(make_section("together", "Symptoms found together", text, columns, table))


def rate_history_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of failure rates over time (figure 5 of the paper)."""
    whole_days = (facts.tables.until_ns - facts.tables.since_ns) // DAY_NS
    days = int(min(failure_rates.ROLLING_DAYS, max(1, whole_days // 4)))
    if facts.by == "outages":
        return outage_history_section(facts, days)
    table = failure_rates.rolling_rates(facts.tables, facts.found, days=days)
    new = failure_rates.rates_of_new_checks(facts.tables, facts.found, days=days)
    columns = [
        ReportColumn("check", "new check"),
        ReportColumn("symptom", "finds"),
        ReportColumn("day", "since", "day"),
        ReportColumn("before", "before", "rate"),
        ReportColumn("after", "after", "rate"),
    ]
    swing = failure_rates.swing(table)
    text = (
        "Failures in 1000 node-days of jobs on GPUs (of all, where none has one), over the"
        f" {days} days up to each day. A new check makes earlier failures visible: the table"
        " has the rate of its symptom before and after it was added."
    )
    notes = [f"the highest rate is {swing:.1f} times the lowest"] if swing else []
    section = make_section("rolling", "How rates change", text, columns, new, notes, series=table)
    drawn = table.drop_nulls("per_1000_node_days")
    return DrawnSection(
        section, partial(report_figures.draw_rate_history, table, new) if len(drawn) > 1 else None
    )


def job_sizes_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of job sizes (figure 6 of the paper)."""
    table = job_runs.jobs_by_size(facts.tables)
    columns = [
        ReportColumn("gpus", "GPUs, up to", "count"),
        ReportColumn("jobs", "attempts", "count"),
        ReportColumn("jobs_share", "of attempts", "share"),
        ReportColumn("gpu_hours", "GPU hours", "GPU hours"),
        ReportColumn("gpu_hours_share", "of GPU hours", "share"),
        ReportColumn("gpu_hours_from", "of that so large or larger", "share"),
    ]
    text = "Attempts that started, by GPUs rounded up to a power of two."
    section = make_section("sizes", "How large jobs are", text, columns, table)
    return DrawnSection(section, partial(report_figures.draw_sizes, table) if len(table) else None)


def mttf_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of MTTF by size (figure 7 of the paper)."""
    table = failure_rates.mttf(facts.tables, facts.found, above_gpus=facts.above_gpus)
    columns = [
        ReportColumn("gpus", "GPUs, up to", "count"),
        ReportColumn("attempts", "attempts", "count"),
        ReportColumn("failures", "failures", "count"),
        ReportColumn("mttf_h", "MTTF, h", "hours"),
        ReportColumn("low_h", "90 % from", "hours"),
        ReportColumn("high_h", "to", "hours"),
        ReportColumn("boot_low_h", "resampled from", "hours"),
        ReportColumn("boot_high_h", "to", "hours"),
        ReportColumn("clusters", "by"),
        ReportColumn("dispersion", "dispersion", "times"),
        ReportColumn("projected_h", "1/N, h", "hours"),
    ]
    rate = facts.rate
    text = (
        "Running time over failures by infrastructure, by size in whole nodes. Two 90 % intervals:"
        " of independent failures (Gamma, failures + 1/2), and by drawing days or job runs anew,"
        " which is the wider the more failures come in bursts (dispersion above 1). 1/N: the"
        f" projection of the failure rate of jobs above {rate.above_gpus:,} GPUs to each size."
    )
    notes = [_rate_note(rate)] if rate.boot_low is not None and rate.boot_high is not None else []
    if rate.failures < FEW:
        notes.append(
            f"{plural(rate.failures, 'failure')} of jobs above {rate.above_gpus:,} GPUs: too few"
            " to project from"
        )
    section = make_section("mttf", "How long jobs run", text, columns, table, notes)
    drawn = table.filter(pl.col("gpus") > 0, pl.col("mttf_h") > 0)
    return DrawnSection(
        section, partial(report_figures.draw_mttf, table, rate) if len(drawn) else None
    )


def _rate_note(rate: failure_rates.FailureRate) -> str:
    return (
        f"r_f of jobs above {rate.above_gpus:,} GPUs: {rate.per_1000_node_days:.2f} failures in"
        f" 1000 node-days, {rate.low:.2f} to {rate.high:.2f} if they were independent,"
        f" {rate.boot_low:.2f} to {rate.boot_high:.2f} by drawing {rate.clusters} anew; dispersion"
        f" {rate.dispersion:.2f}: as sure as {rate.sure_as:.0f} independent failures"
    )


def survived_failures_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of survived failures, which accounting does not record."""
    table = survived_by_cause(facts.tables)
    columns = [
        ReportColumn("cause", "cause"),
        ReportColumn("rung", "recovered by"),
        ReportColumn("failures", "failures", "count"),
        ReportColumn("nodes", "on nodes", "count"),
        ReportColumn("lost_nodes", "took the node", "count"),
        ReportColumn("pause_s", "pause, s", "times"),
    ]
    text = (
        "Failures that runs of `outlast run` survived. The attempt continued: accounting does not"
        " show them. The pause lasts until every rank has committed the interrupted step."
    )
    notes = uncounted_failures_notes(facts)
    return DrawnSection(make_section("survived", "Survived failures", text, columns, table, notes))


def uncounted_failures_notes(facts: ReportFacts) -> list[str]:
    """Return a note if survived failures are missing from figures of ended attempts."""
    count = int(survived_by_cause(facts.tables)["failures"].sum())
    if not count:
        return []
    return [
        f"{plural(count, 'failure')} that jobs survived: r_f, MTTF, causes and lemons count ended"
        " attempts and leave these out; `outlast fleet fit` counts both"
    ]


def outages_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of outages and replaced parts."""
    nodes = node_inventory(facts.tables, facts.host_lists.lazy())
    out, back = outages.outage_rate(facts.tables, nodes), outages.repair_time(facts.tables)
    swapped = outages.part_replacements(facts.tables, nodes)
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
            notes.append(f"the mean outage takes {back.mean_s / 3600:.1f} hours")
    columns = [
        ReportColumn("part", "part"),
        ReportColumn("swaps", "exchanged", "count"),
        ReportColumn("nodes", "on nodes", "count"),
        ReportColumn("per_1000_node_days", "in 1000 node-days", "rate"),
        ReportColumn("per_1000_node_days_low", "90 % from", "rate"),
        ReportColumn("per_1000_node_days_high", "to", "rate"),
    ]
    text = "Outages of nodes, and replaced parts."
    return DrawnSection(
        make_section("repairs", "Outages and replaced parts", text, columns, swapped, notes)
    )


REMEDIES: dict[Action, str] = {
    "restart-app": "a restart of the program",
    "reset-gpu": "a reset of the GPU",
    "reboot": "a reboot",
    "inspect": "an inspection",
    "replace": "a replacement of the part",
    "contact": "a request to the vendor",
    "update": "an update of driver or firmware",
    "ignore": "none is needed",
    "workflow": "depends on other lines of the log",
}
SCHEMA = {
    "code": pl.String, "name": pl.String, "failures": pl.Int64, "nodes": pl.Int64,
    "mends": pl.String, "takes": pl.String, "leaves": pl.String,
}  # fmt: skip


def error_codes_section(facts: ReportFacts) -> DrawnSection:
    """Return the section of error codes and remedies, the most frequent first."""
    ended = (
        facts.found.causes.filter(pl.col("code") != "", pl.col("severity").is_in(CAUSES))
        .join(facts.found.failures.select(KEY), on=KEY, how="semi")
        .group_by("code")
        .agg(failures=pl.struct(KEY).n_unique(), nodes=pl.struct("cluster", "node").n_unique())
        .sort(["failures", "code"], descending=[True, False])
    )
    rows = []
    for code, failures, nodes in ended.iter_rows():
        entry = shipped_policy().entry(code)
        if entry is not None:
            row = (code, entry.name, failures, nodes, REMEDIES[entry.action])
            rows.append((*row, *_disagreements(code, entry)))
    columns = [
        ReportColumn("code", "code"),
        ReportColumn("name", "name"),
        ReportColumn("failures", "of failures", "count"),
        ReportColumn("nodes", "on nodes", "count"),
        ReportColumn("mends", "remedy"),
        ReportColumn("takes", "would drain the node"),
        ReportColumn("leaves", "would keep it"),
    ]
    text = (
        "Codes that NVIDIA's driver logged on the nodes of attempts that infrastructure ended, and"
        " their remedies. Where published policies disagree on draining the node, the last columns"
        f" name the sources of both (policy {shipped_policy().version})."
    )
    table = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    return DrawnSection(make_section("codes", "Remedies of XIDs", text, columns, table))


def _disagreements(code: str, entry: PolicyEntry) -> tuple[str, str]:
    """Return the sources that would drain the node and those that would not, if they differ."""
    kind, _, number = code.partition(" ")
    other = shipped_policy().disagreements(int(number)) if kind == "XID" and entry.says else None
    return (", ".join(other.takes), ", ".join(other.leaves)) if other else ("", "")
