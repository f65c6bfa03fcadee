"""Bandwidths of collectives from the output of nccl-tests and rccl-tests, as text or JSON.

A run in text, after the printf lines of nccl-tests 1.0 to 2.19 (`src/common.cu`, `src/util.cu`):

    # nThread 1 nGpus 1 minBytes 8 maxBytes 128 ...      begins a run
    #  Rank  0 Group  0 Pid   123 on   n1 device  0 ...  one line for each rank
    #  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong
    #   (B)  (elements)                (us)  (GB/s)  (GB/s)  ...
           8      2 float    sum    -1 12.90  0.00  0.00  0  ...  one row for each size
    # Avg bus bandwidth    : 92.3                        ends it

The header names the columns, which differ by version. Runs in one file are separated by the prefix
that mpirun or `srun --label` puts before each line; rows of runs that print at once without one are
rejected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import tzinfo
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import xxhash

from outlast.fleet import host_lists
from outlast.fleet.formats.benchmark_rows import (
    TIMESTAMP,
    BenchmarkReport,
    BenchmarkRow,
    local_ns,
    parse_result,
    parse_row,
    read_report,
)
from outlast.fleet.formats.log_reading import (
    ZONE_ASSUMED,
    LogReading,
    ReadTotals,
    RecordBatch,
    Reject,
    bounded_lines,
    make_reject,
    open_text,
    open_unpacked,
    unreadable_error,
)
from outlast.fleet.record_tables import table
from outlast.log_records import Bandwidth, Finding, Severity, Symptom

CHECK = "nccl-tests"
ORDINARY = "lines without a measurement"
EMPTY = "sizes of 0 bytes"
AT_ONCE = "a row of runs that printed at once: their lines have no prefix that tells them apart"
OTHER_UNITS = "a row in other units than us and GB/s"
CUT_OFF = "bandwidths of runs that did not end"
NO_HOSTS = "bandwidths of runs that do not name their hosts"
NO_NAME = "bandwidths of runs that do not name their collective"
BAD_HOST = "a rank on no host name, or with no rank"
SPLIT = "a run of several groups at once (NCCL_TESTS_SPLIT): its bandwidth is their mean"
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "alltoallv",
    "alltoall",
    "broadcast",
    "gather",
    "hypercube",
    "reduce_scatter",
    "reduce",
    "scatter",
    "sendrecv",
)
_LINE_CHARS = 8192  # of a line that are examined
_WORDS = 64  # of a line that are distinguished
_HELD_MAX = 100_000  # rows
_STREAMS_MAX = 100_000
_BATCH = 50_000  # records
_UNITS = {"B", "elements", "us", "GB/s", "%"}
_PREFIX = re.compile(r"\[([^\]\s]{1,200})\](?:<std(?:out|err)>)?:? ?|\s{0,8}(\d{1,7}): ")
_START = re.compile(r"#?\s{0,8}nThread\s+\d+\s+nGpus\s+\d+\s")
_HEADER = re.compile(r"#\s*(?:size\s+count|bytes\s+N)\s+type\s")
_RANK = re.compile(
    r"#\s*Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s+)?(?:Pid\s+\d+\s+)?on\s+(\S+)\s+device\s"
)
_ROW = re.compile(r"\s*\d{1,18}\s+\d{1,18}\s+[a-zA-Z]")
_END = re.compile(r"#?\s*Avg bus bandwidth\s*:")
_ERROR = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,254}): Test (CUDA failure|NCCL failure|timeout) ([^\n]*)"
)
_COLLECTIVE = re.compile(rf"(?<![a-zA-Z])({'|'.join(COLLECTIVES)})_perf\b")
_NAMED = re.compile(rf"(?<![a-zA-Z])({'|'.join(COLLECTIVES)})(?![a-zA-Z])")  # in a file's name
_ROUTING = re.compile(r"\bNCCL_IB_ADAPTIVE_ROUTING(?: set by environment to |=)(\d)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_JSON = re.compile(r'\{\s*"version"\s*:\s*\d+\s*,\s*"start_time"\s*:\s*"[^"]*"\s*,\s*"args"\s*:')


class BenchmarkContext(NamedTuple):
    """Context of a benchmark's output. `taken_ns`: time of rows without one."""

    cluster: str
    label: str
    zone: tzinfo
    taken_ns: int
    is_zone_given: bool = True


@dataclass
class _Run:
    """One run, as far as it was read. `rows`: line, text, and values or the reason of a reject."""

    label: str
    collective: str
    hosts: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    identity: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    names: list[str] = field(default_factory=list)  # of columns
    rows: list[tuple[int, str, BenchmarkRow | str]] = field(default_factory=list)
    cycles: Counter[tuple[object, ...]] = field(default_factory=Counter)
    ends: int = 0
    is_mixed: bool = False
    has_units: bool = True


def is_benchmark(head: str) -> bool:
    """Return whether a text begins like the output of nccl-tests, as text or JSON."""
    if head.startswith("{"):
        return bool(_JSON.match(head))
    for line in head.splitlines():
        prefix = _PREFIX.match(line, 0, _LINE_CHARS)
        text = line[prefix.end() if prefix else 0 :][:_LINE_CHARS]
        if _START.match(text) or (_HEADER.match(text) and "busbw" in text):
            return True
    return False


def read_benchmark(path: Path, context: BenchmarkContext) -> LogReading:
    """Read the output of nccl-tests: each row is a Bandwidth, each error of CUDA a Finding.

    A run with wrong values is a Finding on each of its hosts: `drain` on a single one, `warn` on
    one of several, since the output does not name the rank.
    """
    return LogReading(str(path), CHECK, lambda totals: _parts(path, context, totals))


def _parts(path: Path, context: BenchmarkContext, totals: ReadTotals) -> Iterator[RecordBatch]:
    totals.names_node = False
    reader = _BenchmarkReader(str(path), context, totals)
    try:
        with open_unpacked(path) as file:
            is_json = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
        if is_json:
            reader.add_report(read_report(path))
        else:
            with open_text(path) as file:
                for number, line in enumerate(bounded_lines(file), 1):
                    reader.add_line(number, line[:_LINE_CHARS].rstrip())
                    if len(reader.records) + len(reader.rejects) >= _BATCH:
                        yield reader.take()
    except (OSError, EOFError) as error:
        raise unreadable_error(path, error) from error
    reader.finish()
    yield reader.take()


class _BenchmarkReader:
    """Reader of runs, one at a time in each stream of a file."""

    def __init__(self, source: str, context: BenchmarkContext, totals: ReadTotals) -> None:
        self.records: list[Bandwidth] = []
        self.findings: list[Finding] = []
        self.rejects: list[Reject] = []
        self._source = source
        self._context = context
        self._totals = totals
        self._runs: dict[str, _Run] = {}
        named = _NAMED.search(Path(source).name.replace("-", "_"))
        self._default = named[1] if named else ""
        self._collective = self._default  # the last that the file named
        self._label = context.label
        self._repeated: Counter[int] = Counter()  # runs by identity
        self._pending_rows = 0  # rows of runs that have not ended

    def take(self) -> RecordBatch:
        """Return what was read since the last call."""
        bandwidths = table(Bandwidth, self.records)
        findings = table(Finding, self.findings)
        part = RecordBatch({"bandwidths": bandwidths, "findings": findings}, self.rejects)
        self.records = []
        self.findings = []
        self.rejects = []
        return part

    def add_line(self, number: int, line: str) -> None:
        """Read one line, which is one row of the log."""
        self._totals.rows += 1
        match = _PREFIX.match(line)
        stream, text = (match[1] or match[2], line[match.end() :]) if match else ("", line)
        run = self._runs.get(stream)
        if run is not None and run.names and _ROW.match(text):
            words = text.split(None, _WORDS)
            row = parse_row(run.names, words, self._context.taken_ns, self._context.zone)
            run.rows.append((number, text, row))
            if run.names[-1] == TIMESTAMP:
                self._note_zone()
            run.is_mixed |= run.ends > 0
            self._pending_rows += 1
            if self._pending_rows >= _HELD_MAX:
                for pending in self._runs.values():
                    self._flush(pending)
        elif match := _ERROR.match(text):
            symptom: Symptom = "gpu-driver" if match[2] == "CUDA failure" else "nccl-timeout"
            detail = f"{match[2]}: {match[3]}"
            self._add_finding(match[1], symptom, "warn", detail, self._context.taken_ns)
        elif run is not None and (match := _RANK.match(text)) and not self._add_rank(run, match):
            self.rejects.append(make_reject(self._source, number, BAD_HOST, line))
        else:
            self._totals.skipped[ORDINARY] += 1
            self._add_heading(stream, run, text)

    def add_report(self, report: BenchmarkReport) -> None:
        """Read a run in JSON, of which each result is a row."""
        run = _Run(self._label, "")
        for text in chain(report.args[:1], (entry for entry in report.env if "ROUTING" in entry)):
            self._add_heading("", run, text)
        run.ends = int(report.out_of_bounds is not None)
        run.collective = run.collective or self._default
        t_ns = local_ns(report.start_time, self._context.zone)
        self._note_zone()
        self._totals.rows += len(report.results)
        for device in report.config.devices if report.config else []:
            if not _HOST.fullmatch(device.hostname):
                self._totals.rows += 1
                self.rejects.append(make_reject(self._source, 0, BAD_HOST, device.hostname))
                continue
            run.hosts.add(device.hostname)
            run.groups.add(str(device.group))
            run.identity.update(f"{device.rank} {device.pid} {device.hostname}".encode())
        if report.config:  # one device of each process is listed
            each = report.config.nthreads * report.config.ngpus
            run.ranks.add(len(report.config.devices) * each - 1)
        for place, result in enumerate(report.results, 1):
            text = bytes(result)[:_LINE_CHARS].decode(errors="replace")
            run.rows.append((place, text, parse_result(result, t_ns)))
        self._pending_rows += len(run.rows)
        self._close(run)

    def finish(self) -> None:
        """Close the runs at the end of the file."""
        for run in self._runs.values():
            self._close(run)

    def _close(self, run: _Run) -> None:
        good = self._flush(run)
        for what, lacks in (
            (CUT_OFF, not run.ends),
            (NO_HOSTS, not run.hosts),
            (NO_NAME, not run.collective),
        ):
            self._totals.odd += Counter({what: lacks * good})
        if good and len(run.groups) > 1 and SPLIT not in self._totals.notes:
            self._totals.notes.append(SPLIT)

    def _flush(self, run: _Run) -> int:
        """Turn the rows of a run into records, or all into rejects for the run's reason.

        Returns the number of records.
        """
        whole = AT_ONCE if run.is_mixed else "" if run.has_units else OTHER_UNITS
        good: list[BenchmarkRow] = []
        for line, text, row in run.rows:
            if isinstance(row, str) or whole:
                self.rejects.append(make_reject(self._source, line, whole or str(row), text))
            elif not row.size:
                self._totals.skipped[EMPTY] += 1
            else:
                good.append(row)
        first = run.rows[0][1] if run.rows else ""
        self._pending_rows -= len(run.rows)
        run.rows.clear()
        if not good:
            return 0
        hosts = host_lists.compress(run.hosts)
        if not run.cycles:  # also the first row: containers have equal process numbers
            run.identity.update(first.encode(errors="replace"))
            digest = run.identity.intdigest()
            self._repeated[digest] += 1
            run.identity.update(str(self._repeated[digest]).encode())
        for row in good:
            key = row[1:5]
            record = Bandwidth(
                t_ns=row.t_ns,
                cluster=self._context.cluster,
                run=run.identity.hexdigest(),
                label=run.label,
                hosts=hosts,
                ranks=max(run.ranks, default=-1) + 1,
                collective=run.collective,
                datatype=row.datatype,
                redop=row.redop,
                root=row.root,
                size_bytes=row.size,
                cycle=run.cycles[key],
                bus_bytes_per_s=row.bus,
                in_place_bytes_per_s=row.in_place,
                wrong=row.wrong,
            )
            self.records.append(record)
            run.cycles[key] += 1
        self._add_wrong(run, [row for row in good if row.wrong])
        return len(good)

    def _note_zone(self) -> None:
        if not self._context.is_zone_given and ZONE_ASSUMED not in self._totals.notes:
            self._totals.notes.append(ZONE_ASSUMED)

    def _add_rank(self, run: _Run, match: re.Match[str]) -> bool:
        """Add a rank's line to its run; False if it names no host."""
        if not _HOST.fullmatch(match[3]) or len(run.hosts) >= host_lists.HOSTS_MAX:
            return False
        run.is_mixed |= int(match[1]) in run.ranks
        run.ranks.add(int(match[1]))
        run.hosts.add(match[3])
        run.groups.add(match[2] or "")
        run.identity.update(match[0].encode(errors="replace"))
        return True

    def _add_heading(self, stream: str, run: _Run | None, text: str) -> None:
        if match := _COLLECTIVE.search(text):
            is_end = "concluded" in text
            self._collective = self._default if is_end else match[1]
            is_next = "starting" in text
            if run and (is_end or not (is_next or run.collective or run.ends)):
                run.collective = match[1]
        if (match := _ROUTING.search(text)) and not self._context.label:
            self._label = f"NCCL_IB_ADAPTIVE_ROUTING={match[1]}"
            if run is not None and not run.names:
                run.label = self._label
        is_header = bool(_HEADER.match(text)) and "busbw" in text.split(None, _WORDS)
        if _START.match(text) or (is_header and (run is None or run.ends)):
            if run is not None:
                self._close(run)
            key = stream if len(self._runs) < _STREAMS_MAX else ""
            run = self._runs[key] = _Run(self._label, self._collective)
        if run is None:
            return
        if is_header:
            run.is_mixed |= bool(run.names)
            run.names = [
                "time" if key == "cputime" else key for key in text.lstrip("# ").split(None, _WORDS)
            ]
        elif text.startswith("#") and "(elements)" in text:
            run.has_units = set(re.findall(r"\(([^()]*)\)", text)) <= _UNITS
        elif _END.match(text):
            run.ends += 1
            run.is_mixed |= run.ends > 1

    def _add_wrong(self, run: _Run, rows: list[BenchmarkRow]) -> None:
        if not rows:
            return
        wrong = sum(row.wrong or 0 for row in rows)
        of = f" of {len(run.hosts)} hosts" if len(run.hosts) > 1 else ""
        detail = f"{wrong:,} wrong values in {run.collective or 'a collective'}{of}"
        severity: Severity = "warn" if of else "drain"
        for host in sorted(run.hosts):
            self._add_finding(host, "other", severity, detail, rows[0].t_ns)
            self._totals.more += 1

    def _add_finding(
        self, node: str, symptom: Symptom, severity: Severity, detail: str, t_ns: int
    ) -> None:
        finding = Finding(
            t_ns=t_ns,
            cluster=self._context.cluster,
            node=node,
            check=CHECK,
            symptom=symptom,
            severity=severity,
            code="",
            device="",
            detail=detail[:1000],
        )
        self.findings.append(finding)
