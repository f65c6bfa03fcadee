"""`outlast fleet lemons`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import count_progress, echo, print_json
from outlast.errors import EXIT_DONE, UsageError
from outlast.fleet.lake import Lake
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import plural

if TYPE_CHECKING:
    import polars as pl

    from outlast.fleet.analysis.lemon_evidence import DrainCommands
    from outlast.fleet.record_tables import Tables

DAY_NS = 86_400 * 10**9
TRUTH_BYTES_MAX = 1 << 30
SHORT = {
    "excl_jobid_count": "excluded by {} job",
    "xid_cnt": "{} XID",
    "tickets": "{} ticket",
    "out_count": "out {} time",
    "multi_node_nodefails": "{} multi-node failure",
    "single_node_nodefails": "{} single-node failure",
}


class LemonsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `ranking`: as in `outlast.fleet.analysis.lemons.rank_lemons`, times in
    Unix ns."""

    cluster: str  # "": none is named
    since_ns: int
    until_ns: int
    by: str  # jobs, or outages where no job is known
    nodes: int
    lemons: int
    failures: int
    without_node: int  # failures without a known node
    ranking: list[dict[str, Any]]  # of lemons with what `lemon_evidence.evidence` has
    drain: list[str]
    not_drained: list[str]
    unsafe: list[str]
    notes: list[str]  # records that were excluded or joined
    # `outlast.fleet.analysis.lemons.RankingScore`; None without truth
    score: dict[str, float | int | None] | None


class _Truth(msgspec.Struct):
    """Contents of `truth.json`."""

    lemons: dict[str, float]


def lemons(
    lake: Path,
    /,
    *,
    days: float = 28.0,
    history_days: float = 112.0,
    until: str | None = None,
    cluster: str | None = None,
    fdr: str = "5%",
    times: float = 4.0,
    top: int = 20,
    drain: bool = False,
    at_once: str = "2%",
    truth: Path | None = None,
    json: bool = False,
) -> int:
    """Rank nodes that fail more often than expected (lemons).

    Counts job failures that are attributed to infrastructure, on the node with a
    finding or the node that Slurm reported. A lake without jobs is ranked by node
    outages.

    Parameters
    ----------
    lake
        Directory that `outlast fleet ingest` wrote.
    days
        Length of the ranked period in days, up to --until.
    history_days
        Length of the period, in days up to --until, of earlier failures that also count as
        evidence.
    until
        End of the period, for example 2024-06-29 in UTC (default: end of the jobs, or of all
        records).
    cluster
        Cluster to rank, if the lake has several; '' for records without a cluster name.
    fdr
        False discovery rate: accepted share of healthy nodes among the lemons.
    times
        Minimum ratio of a lemon's failures to its expected failures.
    top
        Number of nodes to print.
    drain
        Print the scontrol commands that would drain the lemons. They are not executed.
    at_once
        Limit of nodes in these commands, as a share of all nodes.
    truth
        File truth.json of `outlast fleet synth`, to score the ranking against the true lemons.
    json
        Print one JSON object with all nodes.
    """
    if top < 1:
        raise UsageError(f"--top {top}: 1 or more")
    share_max = quantities.share(f"--at-once {at_once}", at_once)
    rate = quantities.share(f"--fdr {fdr}", fdr)
    true = None if truth is None else _true_lemons(truth)
    opened = _open_lake(lake, drain)
    limits = _LemonLimits(days, history_days, rate, times)
    report, listed = _rank(opened, limits, until, cluster, share_max, true)
    if json:
        print_json(report)
        return EXIT_DONE
    _show(report, top)
    if drain:
        _show_drain(listed, report.cluster)
    return EXIT_DONE


def _open_lake(lake: Path, drain: bool) -> Lake:
    """Open a lake. Raises UsageError if nodes should be drained and the lake is anonymized."""
    opened = Lake.open(lake)
    if drain and opened.manifest.anonymous:
        raise UsageError(
            f"--drain: {lake} is anonymized, and commands with its node names could drain an"
            " unrelated node; no commands were printed; use a lake with real node names"
        )
    return opened


class _LemonLimits(NamedTuple):
    """Windows and thresholds of a ranking, from the flags of the same names."""

    days: float
    history_days: float
    fdr: float
    times_min: float


def _load(
    opened: Lake, history_days: float, until: str | None, cluster: str | None, notes: list[str]
) -> tuple[Tables, int, int]:
    """Return the tables of the history, its start and its end in Unix ns."""
    from outlast.fleet.lake_selection import known_period, load_period, parse_flag_time

    if until is None:
        end_ns = known_period(opened, cluster, notes)[1]
    else:
        end_ns = parse_flag_time("--until", until)
    since_ns = max(opened.since_ns, end_ns - round(history_days * DAY_NS))
    return load_period(opened, since_ns, end_ns, cluster=cluster, notes=notes), since_ns, end_ns


def _rank(
    opened: Lake,
    limits: _LemonLimits,
    until: str | None,
    cluster: str | None,
    share_max: float,
    true: list[str] | None,
) -> tuple[LemonsReport, DrainCommands]:
    """Return the report and the commands that drain its lemons."""
    from outlast.fleet.analysis import exposure
    from outlast.fleet.analysis.failure_attribution import (
        attribute_failures,
        attribute_to_nodes,
        worst_nodes,
    )
    from outlast.fleet.analysis.lemon_evidence import drain_commands, lemon_evidence
    from outlast.fleet.analysis.lemons import failure_basis, rank_lemons, score_ranking
    from outlast.fleet.lake_selection import resolve_cluster

    if not 0 < limits.days <= limits.history_days < 1e5:
        raise UsageError(
            f"--days {limits.days:g} --history-days {limits.history_days:g}: both must be above"
            " 0, and --days at most --history-days"
        )
    notes: list[str] = []
    tables, since_ns, end_ns = _load(opened, limits.history_days, until, cluster, notes)
    by = failure_basis(tables)
    if by == "jobs":
        notes += exposure.dominant_attempts(tables)
    else:
        notes += exposure.inventory_notes(tables)
    with count_progress("lemons") as advance:
        advance(0, 2)
        attributed = attribute_failures(tables)
        infra = worst_nodes(attributed).collect().lazy()
        advance(1, 2)
        ranking = rank_lemons(tables, infra, **limits._asdict(), by=by)
    named = (
        attribute_to_nodes(tables, infra)
        .filter("named")
        .select("cluster", "job", "attempt")
        .unique()
    )
    failures = infra.select("cluster", "job", "attempt").unique().collect().height
    real = not opened.manifest.anonymous  # names in an anonymized lake drain nothing
    why = lemon_evidence(tables, attributed, ranking.filter("lemon"))
    listed = drain_commands(ranking.filter(real), share_max=share_max)
    return LemonsReport(
        cluster=resolve_cluster(opened, cluster),
        notes=notes,
        since_ns=max(since_ns, end_ns - round(limits.days * DAY_NS)),
        until_ns=end_ns,
        by=by,
        nodes=ranking.height,
        lemons=int(ranking["lemon"].sum()),
        failures=failures,
        without_node=failures - named.collect().height,
        ranking=_with_evidence(ranking, why),
        drain=listed.lines,
        not_drained=listed.beyond,
        unsafe=listed.unsafe,
        score=None if true is None else score_ranking(ranking, true)._asdict(),
    ), listed


def _with_evidence(ranking: pl.DataFrame, why: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the ranking as rows, each with its evidence; "" where it is no lemon."""
    joined = ranking.join(why, on=["cluster", "node"], how="left", maintain_order="left")
    texts = ("symptom", "code", "device", "part", "why")
    whole = joined.with_columns(
        *(joined[name].fill_null("") for name in texts), joined["exchanged"].fill_null(value=False)
    )
    return whole.to_dicts()


def _true_lemons(path: Path) -> list[str]:
    from outlast.fleet.formats.log_reading import read_bounded

    try:
        return list(
            msgspec.json.decode(read_bounded(path, TRUTH_BYTES_MAX, "is it?"), type=_Truth).lemons
        )
    except msgspec.DecodeError as error:
        raise UsageError(
            f"--truth {path}: {error}; `outlast fleet synth` writes a truth.json"
        ) from error


def _show(report: LemonsReport, top: int) -> None:
    from outlast.fleet.lake import format_time

    said_of = "nodes that ran jobs" if report.by == "jobs" else "nodes, by outages: no job ran then"
    of = f" of {report.cluster}" if report.cluster else ""
    echo(Text(f"{plural(report.lemons, 'lemon')} among {report.nodes:,} {said_of}{of}", "bold"))
    echo(Text(f"from {format_time(report.since_ns)} until {format_time(report.until_ns)}", "dim"))
    for note in report.notes:
        echo(Text(f"note: {note}", "yellow"))
    if not report.nodes:
        echo("no job ran and no node had an outage in this period: nothing to rank")
        return
    suspects = [node for node in report.ranking if node["failures"] > 0 or node["lemon"]][:top]
    if not suspects:
        echo("no node failed in this period")
        return
    figures = ("failures", "expected", "times", "by chance", "node-days")
    # A long name of a node is folded; a figure never is.
    columns = (
        text_column("node"),
        text_column(wrap=False),
        *(number_column(name, wrap=False) for name in figures),
    )
    grid = table(*columns)
    for node in suspects:
        grid.add_row(
            node["node"],
            "lemon" if node["lemon"] else "",
            f"{node['failures']:.3g}",
            f"{node['expected']:.2g}",
            f"{node['times']:.3g}",
            f"{node['p']:.1g}",
            f"{node['node_days']:.1f}",
        )
    echo(grid)
    for one in suspects:
        if one["lemon"]:
            besides = "; ".join(filter(None, (_evidence_text(one), one["why"], _likely_text(one))))
            echo(f"{one['node']}: {besides}")
    hidden = report.lemons - sum(node["lemon"] for node in suspects)
    if hidden:
        echo(f"{plural(hidden, 'more lemon')}: --top {report.lemons} shows all of them")
    if report.score:
        echo(_format_score(report.score))
    if report.without_node:
        echo(
            f"note: of {report.failures:,} failures {report.without_node:,} have no known node:"
            " no node has a finding, and the scheduler reported none"
        )


def _format_score(score: dict[str, float | int | None]) -> str:
    shares = (
        f"{name} {100 * share:.3g} %"
        for name in ("precision", "recall")
        if (share := score[name]) is not None
    )
    return (
        f"of {plural(int(score['true'] or 0), 'true lemon')} {score['right']} found, and"
        f" {int(score['called'] or 0) - int(score['right'] or 0)} healthy nodes ranked as"
        " lemons" + "".join(f", {share}" for share in shares)
    )


def _likely_text(node: dict[str, Any]) -> str:
    """Return the likely faulty part, where the evidence names one."""
    from outlast.fleet.analysis.lemon_evidence import UNKNOWN

    return "" if node["part"] in ("", UNKNOWN) or node["exchanged"] else f"likely {node['part']}"


def _evidence_text(node: dict[str, Any]) -> str:
    phrases = [
        text.format(f"{node[name]:.3g}") + ("" if node[name] == 1 else "s")
        for name, text in SHORT.items()
        if node[name]
    ]
    if node["past_failures"] > node["failures"]:
        phrases.insert(0, f"{node['past_failures']:.3g} failures with history")
    return ", ".join(phrases)


def _show_drain(listed: DrainCommands, cluster: str) -> None:
    if not listed.lines:
        echo("# no lemon to drain")
    elif not cluster:
        echo("# no log names the cluster: run this only where Slurm has these nodes, or add -M")
    for line in listed.lines:
        echo(line)
    if listed.beyond:
        count = len(listed.beyond)
        echo(f"# {count} more are omitted: --at-once limits the nodes per drain")
    for name in listed.unsafe:
        echo(f"# {name!r} is omitted: not a plain node name")
