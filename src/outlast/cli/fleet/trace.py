"""`outlast fleet trace`: the root cause of a hang, from its flight-recorder dumps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.cli.output_stream import count_progress, echo, print_json
from outlast.errors import EXIT_DONE, UsageError

if TYPE_CHECKING:
    from outlast.fleet.flight_recorder.hang_report import HangReport
    from outlast.fleet.flight_recorder.nearby_findings import NearbyFindings

_OTHERS = 8
_WORLD_MAX = 1 << 20


def trace(
    *paths: Path,
    lake: Path | None = None,
    findings: Path | None = None,
    hosts: Path | None = None,
    world: int | None = None,
    cluster: str | None = None,
    json: bool = False,
) -> int:
    """Find the root cause of a hang in flight-recorder dumps.

    Reads dumps of PyTorch's flight recorder, in JSON or pickle. Pickles are parsed
    without executing code.

    Parameters
    ----------
    paths
        Directory with one dump per rank, or the files.
    lake
        Directory that `outlast fleet ingest` wrote, for findings on the node of the rank that
        caused the hang.
    findings
        File with such findings: one JSON finding per line, or a report of `outlast check --json`.
    hosts
        File with lines `RANK HOST`, if the names of the dumps have no host.
    world
        Number of ranks of the job, if the dumps do not contain it.
    cluster
        Cluster of the job, if the lake has several.
    json
        Print one JSON object.
    """
    from outlast.fleet.flight_recorder.hang_report import analyse_dumps
    from outlast.fleet.flight_recorder.recorder_dumps import read_dumps, read_hosts

    if not paths:
        raise UsageError("no dumps were given; try: outlast fleet trace DIRECTORY (or files)")
    if lake is not None and findings is not None:
        raise UsageError("--lake and --findings exclude each other; give one of them")
    if world is not None and not 1 <= world <= _WORLD_MAX:
        raise UsageError(f"--world {world}: from 1 to {_WORLD_MAX:,}")
    if cluster is not None and lake is None:
        raise UsageError(f"--cluster {cluster} needs --lake")
    host_names = read_hosts(hosts) if hosts else None
    with count_progress("dumps") as advance:
        dumps = read_dumps(paths, advance)
    report = analyse_dumps(
        dumps, world=world, hosts=host_names, findings=_source(lake, findings, cluster)
    )
    if json:
        print_json(report)
    else:
        _print(report)
    return EXIT_DONE


def _source(
    lake: Path | None, findings: Path | None, cluster: str | None
) -> Callable[[int], NearbyFindings] | None:
    from outlast.fleet.flight_recorder.nearby_findings import from_lake, from_lines

    if lake is not None:
        return lambda t_ns: from_lake(lake, t_ns, cluster)
    if findings is not None:
        return lambda t_ns: from_lines(findings, t_ns)
    return None


def _print(report: HangReport) -> None:
    from outlast.fleet.flight_recorder.hang_report import describe_health, sentence
    from outlast.fleet.flight_recorder.recorded_operations import format_ranks

    echo(report.verdict)
    for rank in report.ranks[:_OTHERS]:
        if host := report.hosts.get(rank):
            echo(f"  rank {rank} ran on {host}")
    for one in report.health[1:_OTHERS]:
        echo(f"  {describe_health(one)}")
    others = () if report.circle else report.stuck[1:]
    if others:
        echo("Also stalled, as a consequence or later:")
    for stuck in others[:_OTHERS]:
        echo(f"  {sentence(stuck.description)}")
    if rest := others[_OTHERS:]:
        echo(f"  and {len(rest)} more (--json has them)")
    read = f"{len(report.read)} of {report.world} ranks have a dump that can be read"
    echo(f"{read}; {format_ranks(report.missing)} not." if report.missing else f"{read}.")
    if report.wrapped:
        echo(f"The first records of {format_ranks(report.wrapped)} were overwritten.")
    for unread in report.unread[:_OTHERS]:
        echo(f"not used: {unread.reason}")
    if rest := report.unread[_OTHERS:]:
        echo(f"and {len(rest)} more files (--json has them)")
    for note in report.notes:
        echo(f"note: {note}")
