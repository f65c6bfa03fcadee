"""Rows of a benchmark's table, and the JSON that newer versions of nccl-tests write (`-J`)."""

from __future__ import annotations

import datetime as dt
import math
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.errors import SourceError
from outlast.fleet.formats.log_reading import read_bounded
from outlast.fleet.formats.timestamps import EARLIEST_S, LATEST_S

COLUMNS_DIFFER = "a row with other columns than its header"
NO_NUMBER = "a value that is no finite number of 0 or more"
NO_TIME = "no time between 2000 and 2100"
TIMESTAMP = "timestamp"  # the last column, if times were requested
JSON_BYTES_MAX = 256 << 20
JSON_VERSION = 3  # the newest that is known
_GB = 10**9  # bytes
_GB_MAX = 9e9
_COUNT_MAX = 4e18
_CLOCK = "%Y-%m-%d %H:%M:%S"
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_ROOT = re.compile(r"-?\d{1,9}", re.ASCII)


class BenchmarkRow(NamedTuple):
    """Values of one row; bandwidths in bytes per second, None if not measured."""

    t_ns: int
    size: int
    datatype: str
    redop: str
    root: int
    bus: int | None
    in_place: int | None
    wrong: int | None  # None: not validated


def parse_row(
    names: list[str], words: list[str], taken_ns: int, zone: dt.tzinfo
) -> BenchmarkRow | str:
    """Return the values of a row of text, or the reason why it has none.

    `names`: of columns. `taken_ns`: its time if it has none.
    """
    t_ns: int | None = taken_ns
    if names[-1] == TIMESTAMP:
        t_ns = local_ns(" ".join(words[-2:]), zone)
        words = words[:-1]
    if len(words) == len(names) - 1 and "redop" in names:  # no operation is printed as nothing
        words.insert(names.index("redop"), "")
    if len(words) != len(names):
        return COLUMNS_DIFFER
    if t_ns is None:
        return NO_TIME
    of = dict(zip(names, words, strict=True))  # of a name that occurs twice the last
    root = of.get("root", "-1")
    bus = [_number(word) for name, word in zip(names, words, strict=True) if name == "busbw"]
    counts = [
        _number(word, _COUNT_MAX)
        for name, word in zip(names, words, strict=True)
        if name == "#wrong" and word.upper() != "N/A"
    ]
    if None in bus + counts or _number(of.get("time", "")) is None or not _ROOT.fullmatch(root):
        return NO_NUMBER
    key = (int(words[0]), words[2], of.get("redop", of.get("op", "")), int(root))
    return BenchmarkRow(t_ns, *key, _bytes_per_s(bus[0]), _bytes_per_s(*bus[1:2]), _sum(counts))


class _Timing(msgspec.Struct):
    bus_bw: float | str
    nwrong: float | str | None = None


class _Result(msgspec.Struct):
    size: int
    type: str
    redop: str
    root: str
    out_of_place: _Timing | None = None
    in_place: _Timing | None = None


class _Device(msgspec.Struct):
    rank: int
    hostname: str
    group: int = 0
    pid: int = 0


class _Config(msgspec.Struct):
    nthreads: int
    ngpus: int
    devices: list[_Device] = []


class BenchmarkReport(msgspec.Struct):
    """JSON of one run, with undecoded results."""

    version: int
    start_time: str
    args: list[str]
    env: list[str] = []
    config: _Config | None = None
    results: list[msgspec.Raw] = []
    out_of_bounds: dict[str, object] | None = None  # written at the end


def read_report(path: Path) -> BenchmarkReport:
    """Read the JSON of a run. Raises SourceError for a truncated or newer one."""
    data = read_bounded(path, JSON_BYTES_MAX, "no benchmark's JSON is so large")
    try:
        report = msgspec.json.decode(data, type=BenchmarkReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SourceError(f"{path} is no complete JSON of nccl-tests: {error}") from error
    if report.version > JSON_VERSION:
        raise SourceError(
            f"{path} has version {report.version} of the JSON of nccl-tests, and {JSON_VERSION} is"
            " the newest that is known; nothing was read"
        )
    return report


def parse_result(raw: msgspec.Raw, t_ns: int | None) -> BenchmarkRow | str:
    """Return the values of a result in JSON, or the reason why it has none."""
    try:
        result = msgspec.json.decode(raw, type=_Result)
    except (msgspec.DecodeError, RecursionError):
        return COLUMNS_DIFFER
    both = [each for each in (result.out_of_place, result.in_place) if each]
    values = [_number(str(each.bus_bw)) for each in both]
    counts = [_number(str(each.nwrong), _COUNT_MAX) for each in both if each.nwrong is not None]
    root = result.root.strip()
    if not both or None in values + counts or not _ROOT.fullmatch(root) or result.size < 0:
        return NO_NUMBER
    if t_ns is None:
        return NO_TIME
    key = (result.size, result.type, result.redop, int(root))
    bus = _bytes_per_s(values[0] if result.out_of_place else None)
    in_place = _bytes_per_s(values[-1] if result.in_place else None)
    return BenchmarkRow(t_ns, *key, bus, in_place, _sum(counts))


def _number(word: str, most: float = _GB_MAX) -> float | None:
    """Return a number; None for one that is negative, not finite or above all records."""
    value = float(word) if _NUMBER.fullmatch(word) else math.inf
    return value if value < most else None


def _bytes_per_s(gb_per_s: float | None = None) -> int | None:
    return None if gb_per_s is None else round(gb_per_s * _GB)


def _sum(counts: list[float | None]) -> int | None:
    return int(sum(count or 0 for count in counts)) if counts else None


def local_ns(text: str, zone: dt.tzinfo) -> int | None:
    """Return the Unix nanoseconds of a local time; None if it is none from 2000 to 2100."""
    try:
        seconds = round(dt.datetime.strptime(text, _CLOCK).replace(tzinfo=zone).timestamp())
    except (ValueError, OverflowError):
        return None
    return seconds * 10**9 if EARLIEST_S <= seconds < LATEST_S else None
