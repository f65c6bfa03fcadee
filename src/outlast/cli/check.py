"""`outlast check`: health checks of this node, for Slurm, for Nagios, or by hand."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from cyclopts import Parameter
from msgspec.structs import replace

from outlast.cli.output_stream import echo, echo_error, print_json
from outlast.errors import EXIT_DONE, OutlastError, StorageError, UsageError
from outlast.health import check_settings as settings_of
from outlast.health.check_settings import CheckSettings, Profile, RingSettings
from outlast.health.checks import neighbour_check
from outlast.health.node_examination import (
    SHIPPED,
    Examined,
    Subject,
    all_checks,
    checks_of_profile,
    examine,
    examine_recording,
)
from outlast.health.node_report import NodeReport, exit_code, nagios, report_lines
from outlast.node_logs import nvidia_errors as policies

NAGIOS_UNKNOWN = 3
PROFILE: Profile = "periodic"  # the default

Format = Literal["text", "json", "nagios"]


def check(
    *,
    profile: Profile = PROFILE,
    settings: Path | None = None,
    state: Path | None = None,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    record: Path | None = None,
    replay: Path | None = None,
    drain: bool = False,
    metrics_file: Path | None = None,
    learn: Path | None = None,
    ring: str = "",
    rank: int = 0,
    world: int = 0,
    format: Format = "text",  # noqa: A002 - the flag's name
    json: bool = False,
) -> int:
    """Check this node: GPUs, links, file systems, kernel log, memory, services.

    Exit code 0: healthy, or only warnings. 1: a finding of severity now (jobs fail)
    or drain (after its job). 2: wrong usage. 3: a check was inconclusive. With
    --format nagios: 0 ok, 1 warning, 2 critical, 3 unknown.

    Parameters
    ----------
    profile
        Set of checks with a time limit (s): prolog 10, periodic 30, epilog 20, preflight 300.
    settings
        TOML file with the expected hardware of this node and custom checks (see docs/check.md).
    state
        Directory for state between calls: error counters, link flaps and the position in the kernel
        log (default: none).
    only
        Run only these checks, for example --only gpu link (default: all of the profile).
    record
        Write the measured samples to this file, for --replay.
    replay
        Judge the samples of a file written by --record instead of this machine.
    drain
        Drain this node with scontrol on a finding of severity now or drain. Nodes that are down or
        drained stay as they are. The settings limit drained nodes to 2 % of the fleet per hour. Not
        possible in a prolog or epilog. Nodes are never resumed.
    metrics_file
        Write metrics of this profile into this file, for Prometheus' node exporter.
    learn
        Write a new settings file with this node's hardware as expectations, and check nothing.
    ring
        Measure all-reduces between neighbouring nodes: host:port of the node with --rank 0. Start
        the command on all nodes at once, with --profile preflight or --only neighbour.
    rank
        Rank of this node for --ring, counted from 0.
    world
        Number of nodes for --ring.
    format
        Output format.
    json
        Same as --format json.
    """
    form = _form(format, json=json)
    meet = RingSettings(address=ring, rank=rank, world=world)
    paths = (settings, state, only, record, replay)
    request = CheckRequest(profile, *paths, drain, form, meet, metrics_file)
    if learn is not None:
        return _learnt(learn, request)
    return _checked_for_nagios(request) if form == "nagios" else _checked(request)


def _checked_for_nagios(request: CheckRequest) -> int:
    try:
        return _checked(request)
    except OutlastError as error:
        # Nagios would read exit codes 1 and 2 as trouble of the node.
        echo(f"UNKNOWN - nothing was checked: {error}".replace("|", "/").replace("\n", " "))
        return NAGIOS_UNKNOWN


def _form(output_format: Format, *, json: bool) -> Format:
    """Return the output format. Raises UsageError if `--json` contradicts it."""
    if json and output_format == "nagios":
        raise UsageError("--json and --format nagios exclude each other")
    return "json" if json else output_format


class CheckRequest(NamedTuple):
    """Parsed flags of one check: profile, settings, state, chosen checks, path of a recording."""

    profile: Profile
    settings: Path | None
    state: Path | None
    only: tuple[str, ...]
    record: Path | None
    replay: Path | None
    drain: bool
    form: Format
    ring: RingSettings
    metrics_file: Path | None = None


def _checked(request: CheckRequest) -> int:
    loaded = settings_of.read_settings(request.settings) if request.settings else None
    if request.settings and loaded and loaded.own and os.geteuid() == 0:
        _refuse_foreign(request.settings)
    _refuse_both(request)
    export = _metrics_writer(request.metrics_file, request.only)
    if request.replay is not None:
        report, used = _replayed(request, request.replay, loaded)
        return _shown(report, used, request.form)
    used = _with_ring(loaded or CheckSettings(), request.ring)
    subject = _subject(request.profile, used)
    checks = all_checks(used)
    selected = checks_of_profile(request.profile, used, checks, request.only)
    if request.ring.address and neighbour_check.CHECK not in selected:
        raise UsageError(
            "--ring needs --profile preflight or --only neighbour; nothing was checked"
        )
    done = examine(subject, selected, request.state, checks)
    if request.record is not None:
        _recorded(request.record, subject, done)
    report = done.report
    if request.drain:
        from outlast.health.node_drain import (
            drain_node as drained,  # lazy: rarely needed, and a prolog delays a job
        )

        outcome = drained(report, used.drain)
        state = "drained" if outcome.drained else "not drained"
        report = replace(report, notes=(*report.notes, f"{state}: {outcome.why}"))
    export(report)
    return _shown(report, used, request.form)


def _refuse_foreign(settings: Path) -> None:
    """Raise UsageError for settings that other users can write: root executes their checks."""
    status = settings.stat()
    if status.st_uid or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{settings} has custom checks, which root would execute, and other users can write"
            " to it; nothing was checked; run: chown root, chmod go-w"
        )


def _with_ring(settings: CheckSettings, ring: RingSettings) -> CheckSettings:
    """Add the ring test's address to the settings. Raises UsageError for a bad rank or address."""
    if not ring.address:
        if ring.rank or ring.world:
            raise UsageError("--rank and --world need --ring; nothing was checked")
        return settings
    host, _, port = ring.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--ring {ring.address} is not host:port, as in node1:29500; nothing was checked"
        )
    if ring.world < 2 or not 0 <= ring.rank < ring.world:
        raise UsageError(
            f"--rank {ring.rank} --world {ring.world}: --world must be at least 2, and --rank"
            " from 0 to --world - 1; nothing was checked"
        )
    own = {name: getattr(ring, name) for name in ("address", "rank", "world")}
    return replace(settings, ring=replace(settings.ring, **own))


def _metrics_writer(path: Path | None, only: tuple[str, ...]) -> Callable[[NodeReport], None]:
    """Return what writes the metrics of a report. A file that cannot be written is named, and
    changes no verdict: it could drain a healthy node. Raises UsageError, before any check."""
    if path is None:
        return lambda _: None
    from outlast.health.check_metrics import check_metrics  # an optional package
    from outlast.telemetry.metrics.metrics_file import check_metrics_file, write_metrics

    check_metrics_file(path, "nothing was checked")

    def export(report: NodeReport) -> None:
        try:
            write_metrics(path, check_metrics(report, only))
        except StorageError as error:
            echo_error(f"outlast: {error}")

    return export


def _refuse_both(request: CheckRequest) -> None:
    elsewhere = request.record or request.state or request.drain or request.metrics_file
    if request.replay and elsewhere:
        raise UsageError(
            "--replay does not examine this machine: omit --record, --state, --drain and"
            " --metrics-file; nothing was judged"
        )
    if request.replay and request.ring != RingSettings(world=0):
        raise UsageError(
            "--replay does not measure: omit --ring, --rank and --world; nothing was judged"
        )
    if request.drain and request.profile in {"prolog", "epilog"}:
        raise UsageError(
            f"--drain cannot be used in a {request.profile}: Slurm forbids scontrol there, and"
            " drains the node itself by the exit code; nothing was checked"
        )


def _refuse_beside_learn(request: CheckRequest) -> None:
    """Raise UsageError for flags that `--learn` excludes."""
    bare = CheckRequest(
        "periodic", None, None, (), None, None, False, request.form, RingSettings(world=0)
    )
    if request != bare:
        raise UsageError("--learn excludes all flags but --json; nothing was written")


def _learnt(path: Path, request: CheckRequest) -> int:
    _refuse_beside_learn(request)
    from outlast.health.learned_settings import learn as learn_settings

    text = learn_settings(path, SHIPPED)
    if request.form == "json":
        print_json({"version": 1, "settings": str(path), "text": text})
    else:
        echo(f"{path}: written; review it before use")
        for line in text.splitlines():
            if line.startswith("# not learnt"):
                echo(line.removeprefix("# "))
    return EXIT_DONE


def _subject(profile: Profile, settings: CheckSettings) -> Subject:
    policy = policies.load_policy(Path(settings.kernel.policy)) if settings.kernel.policy else None
    node = settings.node or platform.node().partition(".")[0]
    return Subject(settings.cluster, node, profile, settings, policy)


def _recorded(path: Path, subject: Subject, done: Examined) -> None:
    from outlast.health import node_examination

    head = node_examination.RecordingHead(
        cluster=subject.cluster,
        node=subject.node,
        profile=subject.profile,
        t_ns=done.report.t_ns,
        settings=subject.settings,
        memory=done.before,
    )
    node_examination.write_recording(path, head, done.taken)


def _replayed(
    request: CheckRequest, path: Path, settings: CheckSettings | None
) -> tuple[NodeReport, CheckSettings]:
    """Judge a recording. Raises SourceError; UsageError for a profile or check not recorded."""
    from outlast.health import node_examination
    from outlast.health.node_examination import apply_settings

    head, taken = node_examination.read_recording(path)
    if request.profile not in (PROFILE, head.profile):
        raise UsageError(
            f"{path} was recorded with --profile {head.profile}, not {request.profile}: omit"
            " --profile; nothing was judged"
        )
    used = settings or head.settings
    checks = all_checks(used)
    if request.only:
        names = {
            check.name for check in checks_of_profile(head.profile, used, checks, request.only)
        }
        if missing := sorted(names - {sample.check for sample in taken}):
            raise UsageError(f"{path} has no sample of {', '.join(missing)}; nothing was judged")
        taken = [sample for sample in taken if sample.check in names]
    subject = _subject(head.profile, used)._replace(cluster=head.cluster, node=head.node)
    taken = apply_settings(taken, used, head.settings)
    report = examine_recording(subject, taken, head.memory, head.t_ns, checks)
    if head.samples is None:
        note = "recorded before samples were counted: the file may be incomplete"
        report = replace(report, notes=(*report.notes, note))
    return report, used


def _shown(report: NodeReport, settings: CheckSettings, form: Format) -> int:
    if form == "nagios":
        code, line = nagios(report)
        echo(line)
        return code
    if form == "json":
        print_json(report)
    else:
        echo(f"{report.node}: {report.severity}  ({report.profile}, {report.took_s:.2f} s)")
        for line in report_lines(report):
            echo(line)
    return exit_code(report, unknown_passes=settings.unknown_passes)
