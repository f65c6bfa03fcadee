"""Detection of a log's format by its first bytes, and the reader of each format."""

from __future__ import annotations

import datetime as dt
import difflib
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from outlast.errors import SourceError, UsageError
from outlast.fleet.formats import (
    collective_benchmarks,
    column_mapping,
    hardware_logs,
    launched_runs,
    mapped_logs,
    outage_logs,
    sacct,
)
from outlast.fleet.formats.log_reading import (
    LogReading,
    open_unpacked,
    refuse_foreign_format,
    refuse_special_file,
)
from outlast.fleet.formats.sacct.sacct_reader import explain_unreadable, is_text
from outlast.fleet.formats.timestamps import EARLIEST_S, LATEST_S
from outlast.fleet.host_lists import HOSTS_MAX
from outlast.node_logs import dcgm, nvidia_errors
from outlast.node_logs.log_envelopes import has_known_time

Format = Literal[
    "sacct",
    "sacct-json",
    "events",
    "jobs",
    "faults",
    "kernel",
    "dcgm",
    "nvidia-smi",
    "ipmi",
    "check",
    "run",
    "slurm-events",
    "nccl-tests",
]
FORMATS: tuple[Format, ...] = get_args(Format)
HEAD_BYTES = 1 << 16
_SMI = re.compile(r"[^\n]*\b(uuid|pci\.bus_id|temperature\.gpu|utilization\.gpu|ecc\.)[^\n]*,")
_SEL = re.compile(r"(SEL[^\n]*\n)?\s*[0-9a-f]{1,8} \| (\d\d/\d\d/\d\d(\d\d)?|Pre-Init)")
_RUN_EVENTS = "events"  # the directory in a run's directory that makes it one


class LogOptions(NamedTuple):
    """Options of reading logs; None or "" if not given."""

    format: Format | None = None
    mapping: Path | None = None
    cluster: str = ""
    zone: str = ""
    node: str = ""
    nodes: int | None = None
    gpus_per_node: int | None = None
    epoch: str = ""
    at: str = ""  # when the logs were taken; default: the files' modification times
    boot: str = ""  # when the node was booted
    delimiter: str = ""  # of accounting; default: from its header
    columns: str = ""  # of accounting without a header
    policy: Path | None = None  # of XIDs; default: the shipped one
    label: str = ""  # of an experiment, for benchmarks

    def node_of(self, path: Path) -> str:
        """Return the given node name.

        {name} in it is replaced by the log's name without suffix, {folder} by its directory's name.
        """
        return _fill_in(self.node, path)

    def label_of(self, path: Path) -> str:
        """Return the given label, with the same replacements."""
        return _fill_in(self.label, path)

    @property
    def zone_info(self) -> ZoneInfo:
        """The given time zone, or UTC. Raises UsageError for an unknown one."""
        try:
            return ZoneInfo(self.zone or "UTC")
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            close = difflib.get_close_matches(self.zone, available_timezones(), n=1)
            hint = f"did you mean {close[0]}?" if close else "use a name as in Europe/Paris"
            raise UsageError(f"--zone {self.zone}: there is no such time zone; {hint}") from error


def _fill_in(text: str, path: Path) -> str:
    name = path.name.removesuffix(".gz")
    stem = name.rpartition(".")[0] or name
    return text.replace("{name}", stem).replace("{folder}", path.absolute().parent.name)


def detect_format(path: Path, options: LogOptions) -> Format:
    """Return the given format, else the one detected by content.

    Raises UsageError for a missing path or a directory of no run, SourceError for unknown content.
    """
    if not path.exists():
        why = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
        raise UsageError(f"{path} {why}; nothing was read")
    if not path.is_dir():
        refuse_special_file(path)
    else:
        if not (path / _RUN_EVENTS).is_dir():
            raise UsageError(f"{path} is a directory, but not of a run; name the logs in it")
        found: Format = "run"
        if options.format not in (None, found):
            raise UsageError(f"{path} is a directory, and cannot be read as {options.format}")
        return found
    head = _head(path)
    if options.format is not None:
        return options.format
    if options.columns:  # only accounting without a header needs them
        return "sacct"
    beside = _find_mapping(path, options)
    if options.mapping is None:
        for format_, fits in _FITS.items():
            # Other schedulers' exports have a list of jobs as well.
            if fits(head) and not (format_ == "sacct-json" and beside):
                return format_
    if beside:
        return "jobs" if column_mapping.load_mapping(beside).rows == "jobs" else "events"
    if why := explain_unreadable(str(path), head.encode()):
        raise why
    raise SourceError(
        f"{path} has an unknown format: it begins with {head[:60]!r}; nothing was read. Name"
        f" the format with --as ({', '.join(FORMATS)}), or its columns with --mapping or in"
        f" {path.stem}.toml beside it"
    )


def open_log(path: Path, format_: Format, options: LogOptions) -> LogReading:
    """Return the log's reader, which has not read yet. Raises UsageError for a missing option."""
    return _READERS[format_](path, options)


def _head(path: Path) -> str:
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise SourceError(f"{path} cannot be read: {error}; nothing was read") from error
    if not head.strip():
        raise SourceError(f"{path} is empty; nothing was read")
    refuse_foreign_format(path, head)
    return head.decode(errors="replace").removeprefix("\ufeff").lstrip()


def _read_faults(path: Path, options: LogOptions) -> LogReading:
    if not options.epoch:
        raise UsageError(
            f"{path} counts days from a day 0 that it does not contain: pass it, as in"
            " --epoch 2024-03-30"
        )
    for flag, count, most in (
        ("--nodes", options.nodes, HOSTS_MAX),
        ("--gpus-per-node", options.gpus_per_node, 1024),
    ):
        if count is not None and not 1 <= count <= most:
            raise UsageError(f"{flag} {count}: from 1 to {most:,}")
    return outage_logs.read_fault_trace(
        path,
        outage_logs.TracedCluster(
            epoch_ns=_moment("--epoch", options.epoch, options),
            name=options.cluster,
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node or 0,
        ),
    )


def _moment(flag: str, text: str, options: LogOptions) -> int:
    """Parse a date or time into Unix nanoseconds. Raises UsageError."""
    try:
        when = dt.datetime.fromisoformat(text)
        known = when if when.tzinfo else when.replace(tzinfo=options.zone_info)
        found_s = round(known.timestamp())
        if not EARLIEST_S <= found_s < LATEST_S:
            raise ValueError("not between 2000 and 2100")
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{flag} {text}: not a date or time between 2000 and 2100, as in 2024-03-30 or"
            " 2024-03-30T12:00:00+01:00"
        ) from error
    return found_s * 10**9


def _find_mapping(path: Path, options: LogOptions) -> Path | None:
    """Return the given mapping, or the one beside the log under its name."""
    if options.mapping:
        return options.mapping
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    for beside in (path.with_suffix(".toml"), plain.with_suffix(".toml")):
        if beside.is_file() and beside != path:
            return beside
    return None


def _read_mapped(path: Path, options: LogOptions) -> LogReading:
    file = _find_mapping(path, options)
    if file is None:
        raise UsageError(
            f"{path}: unknown columns; pass a mapping with --mapping FILE (see docs/fleet.md)"
        )
    mapping = column_mapping.load_mapping(file)
    if options.format in ("events", "jobs") and (mapping.rows == "jobs") != (
        options.format == "jobs"
    ):
        raise UsageError(f"--as {options.format}: {file} has rows = {mapping.rows!r}")
    return mapped_logs.read_mapped(path, mapping, _mapped_context(path, options))


def _mapped_context(path: Path, options: LogOptions) -> mapped_logs.MappedLogContext:
    zone = options.zone_info.key if options.zone else ""
    taken_ns = _moment("--at", options.at, options) if options.at else path.stat().st_mtime_ns
    return mapped_logs.MappedLogContext(zone, options.cluster, taken_ns)


def _read_sacct(path: Path, settings: LogOptions) -> LogReading:
    try:
        escaped = settings.delimiter.encode("latin-1", "backslashreplace")
        delimiter = escaped.decode("unicode_escape")
        delimiter.encode()
    except UnicodeError as error:
        raise UsageError(f"--delimiter {settings.delimiter}: {error}; nothing was read") from error
    options = sacct.SacctOptions(
        zone=settings.zone_info.key,
        is_zone_given=bool(settings.zone),
        cluster=settings.cluster,
        delimiter=delimiter,
        columns=tuple(filter(None, settings.columns.split(","))),
        taken_ns=_moment("--at", settings.at, settings) if settings.at else None,
    )
    return sacct.read_sacct(path, options)


def _is_sacct_json(head: str) -> bool:
    return head.startswith("{") and bool(re.search(r'"jobs"\s*:\s*\[', head))


def _hardware_context(path: Path, options: LogOptions) -> hardware_logs.HardwareLogContext:
    return hardware_logs.HardwareLogContext(
        cluster=options.cluster,
        node=options.node_of(path),
        zone=options.zone_info,
        taken_ns=_moment("--at", options.at, options) if options.at else path.stat().st_mtime_ns,
        boot_ns=_moment("--boot", options.boot, options) if options.boot else None,
        policy=nvidia_errors.load_policy(options.policy) if options.policy else None,
        is_zone_given=bool(options.zone),
    )


def _read_benchmark(path: Path, options: LogOptions) -> LogReading:
    context = collective_benchmarks.BenchmarkContext(
        cluster=options.cluster,
        label=options.label_of(path),
        zone=options.zone_info,
        taken_ns=_moment("--at", options.at, options) if options.at else path.stat().st_mtime_ns,
        is_zone_given=bool(options.zone),
    )
    return collective_benchmarks.read_benchmark(path, context)


def _is_kernel(head: str) -> bool:
    lines = head.splitlines()[:50]
    return sum(has_known_time(line) for line in lines) * 2 > len(lines)


_FITS: dict[Format, Callable[[str], bool]] = {
    "slurm-events": outage_logs.is_slurm_events,
    "check": hardware_logs.is_check_report,
    "faults": lambda head: head.startswith("[") and '"fault_start"' in head,
    "dcgm": lambda head: any(f'"{each}"' in head for each in (*dcgm.ROOTS, "Overall Health")),
    "nvidia-smi": lambda head: "<nvidia_smi_log" in head or bool(_SMI.match(head)),
    "ipmi": lambda head: bool(_SEL.match(head)),
    "nccl-tests": collective_benchmarks.is_benchmark,
    "kernel": _is_kernel,
    "sacct-json": _is_sacct_json,
    "sacct": lambda head: is_text(head.encode()),
}
_READERS: dict[Format, Callable[[Path, LogOptions], LogReading]] = {
    "faults": _read_faults,
    "kernel": lambda path, options: hardware_logs.read_kernel_log(
        path, _hardware_context(path, options)
    ),
    "ipmi": lambda path, options: hardware_logs.read_event_log(
        path, _hardware_context(path, options)
    ),
    "dcgm": lambda path, options: hardware_logs.read_dcgm(path, _hardware_context(path, options)),
    "nvidia-smi": lambda path, options: hardware_logs.read_nvidia_smi(
        path, _hardware_context(path, options)
    ),
    "check": lambda path, options: hardware_logs.read_check_reports(path, options.cluster),
    "slurm-events": lambda path, options: outage_logs.read_slurm_events(
        path, _mapped_context(path, options)
    ),
    "events": _read_mapped,
    "jobs": _read_mapped,
    "sacct": _read_sacct,
    "sacct-json": _read_sacct,
    "run": lambda path, options: launched_runs.read_run(path, options.cluster),
    "nccl-tests": _read_benchmark,
}
# Formats that each option applies to; it is refused for others.
_ONLY: dict[str, tuple[str, frozenset[Format]]] = {
    "mapping": ("--mapping", frozenset({"events", "jobs"})),
    "nodes": ("--nodes", frozenset({"faults"})),
    "gpus_per_node": ("--gpus-per-node", frozenset({"faults"})),
    "epoch": ("--epoch", frozenset({"faults"})),
    "node": ("--node", frozenset({"kernel", "ipmi", "dcgm", "nvidia-smi"})),
    "at": (
        "--at",
        frozenset({"sacct", "sacct-json", "kernel", "dcgm", "nvidia-smi", "jobs", "nccl-tests"}),
    ),
    "label": ("--label", frozenset({"nccl-tests"})),
    "boot": ("--boot", frozenset({"kernel"})),
    "policy": ("--policy", frozenset({"kernel"})),
    "delimiter": ("--delimiter", frozenset({"sacct"})),
    "columns": ("--columns", frozenset({"sacct"})),
}


# Options that change the records of a log.
_CHANGING = ("zone", "nodes", "gpus_per_node", "epoch", "at", "boot", "delimiter", "columns")
PLACE_FLAGS = ("--cluster", "--node")


def reading_options(path: Path, format_: Format, options: LogOptions) -> dict[str, str]:
    """Return the options that a log is read with, by flag: its format, mapping, node and others.

    Two readings of one content with equal options give equal records. Raises SourceError for a
    mapping or policy that cannot be read.
    """
    found: dict[str, str] = {"--as": format_}
    for key in _CHANGING:
        flag, fitting = _ONLY.get(key, (f"--{key}", frozenset(FORMATS)))
        if (value := getattr(options, key)) and format_ in fitting:
            found[flag] = str(value)
    place = (options.cluster, options.node_of(path))
    used = (True, format_ in _ONLY["node"][1])
    found |= {f: v for f, v, is_used in zip(PLACE_FLAGS, place, used, strict=True) if v and is_used}
    mapping = _find_mapping(path, options) if format_ in ("events", "jobs") else None
    policy = options.policy if format_ == "kernel" else None
    for flag, file in (("--mapping", mapping), ("--policy", policy)):
        if file:
            try:
                found[flag] = file.read_text(errors="replace")
            except OSError as error:
                raise SourceError(f"{file} cannot be read: {error.strerror}") from error
    return found


def refuse_unused_options(formats: Collection[Format], options: LogOptions) -> None:
    """Refuse options that apply to none of these logs. Raises UsageError."""
    for key, (flag, fitting) in _ONLY.items():
        if getattr(options, key) and not fitting & set(formats):
            raise UsageError(
                f"{flag} goes with {' or '.join(sorted(fitting))}, not with"
                f" {' or '.join(sorted(formats))}; nothing was read"
            )
