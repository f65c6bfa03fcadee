"""Values of accounting fields: states, GPUs, exit codes, spans, times.

All are functions of a text; `map_texts` calls them once for each distinct text of a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import polars as pl

from outlast.log_records import JOB_STATES

PENDING = "PENDING"
SIGNALS = 1000
NOTHING = ("Unknown", "None", "N/A", "None assigned", "INVALID", "(null)", "-")

_ALSO = {  # sacct's short forms, and flags and transitions of jobs
    "PENDING": PENDING, "PD": PENDING, "CONFIGURING": "RUNNING", "CF": "RUNNING",
    "COMPLETING": "RUNNING", "CG": "RUNNING", "SIGNALING": "RUNNING", "STAGE_OUT": "RUNNING",
    "STOPPED": "SUSPENDED", "ST": "SUSPENDED", "S": "SUSPENDED", "R": "RUNNING",
    "CD": "COMPLETED", "CA": "CANCELLED", "F": "FAILED", "NF": "NODE_FAIL", "TO": "TIMEOUT",
    "PR": "PREEMPTED", "RQ": "REQUEUED", "OOM": "OUT_OF_MEMORY", "BF": "BOOT_FAIL",
    "DL": "DEADLINE", "RV": "REVOKED", "LAUNCH_FAILED": "BOOT_FAIL", "RECONFIG_FAIL": "BOOT_FAIL",
    "SPECIAL_EXIT": "REQUEUED", "REQUEUE_HOLD": "REQUEUED", "REQUEUE_FED": "REQUEUED",
    "RESIZING": "REQUEUED", "RS": "REQUEUED", "CANCELED": "CANCELLED",
}  # fmt: skip
STATES = dict.fromkeys(JOB_STATES, "") | _ALSO
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SPAN = re.compile(r"(-?)(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_EXCLUDES = re.compile(r"--exclude(?:[= ]|$)|\s-x")
# Options of sbatch, srun and salloc that have a value in the word after them.
_SHORT_VALUED = "AabBcCdDeFGiJLmMnNopqStwx"
_SWITCHES = frozenset(
    "contiguous exclusive help hold ignore-pbs no-kill no-requeue overcommit oversubscribe parsable"  # noqa: SIM905
    " quiet requeue reboot spread-job test-only usage verbose version wait use-min-nodes"
    " interactive overlap label unbuffered pty preserve-env disable-status".split()
)


def map_texts(column: pl.Series, of: Callable[[str], Any], dtype: pl.DataType) -> pl.Series:
    """Apply `of` to each distinct text; null stays null."""
    texts = column.drop_nulls().unique()
    if texts.is_empty():
        return pl.Series(column.name, [None], dtype=dtype).new_from_index(0, len(column))
    values = pl.Series([of(text) for text in texts], dtype=dtype)
    return column.replace_strict(texts, values, default=None, return_dtype=dtype)


def parse_state(text: str) -> str | None:
    """Return a job state, PENDING, or None for an unknown one.

    `CANCELLED by 1000` and `CANCELLED+` are CANCELLED; a cut name must be unambiguous.
    """
    word, _, _ = text.strip().upper().partition(" ")
    cut = word.endswith("+")
    word = word.removesuffix("+")
    if word in STATES and not cut:
        return STATES[word] or word
    states = {STATES[name] or name for name in STATES if cut and word and name.startswith(word)}
    return states.pop() if len(states) == 1 else None


def tres_gpus(text: str) -> int | None:
    """Return the GPUs in `billing=12,cpu=12,gres/gpu=2,gres/gpu:a100=2,node=1`.

    The entry without a type is the total; else the types are summed. None for an invalid count.
    """
    return _gpus(part.partition("=")[::2] for part in text.split(","))


def gres_gpus(text: str) -> int | None:
    """Return the GPUs in `gpu:a100:2,craynetwork:1`, the format of old Slurm."""
    parts = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = part.strip().removeprefix("gres:").removeprefix("gres/").split(":")
        number = words.pop() if len(words) > 1 and words[-1][:1].isdigit() else "1"
        parts.append(("gres/" + ":".join(words), number))
    return _gpus(parts)


def tres_nodes(text: str) -> int | None:
    """Return the nodes in a TRES text; None without any."""
    match = re.search(r"(?:^|,)node=(\d{1,9})(?:,|$)", text)
    return int(match[1]) if match else None


def parse_count(text: str) -> int | None:
    """Parse a count such as 2048 or 2K; None if it is invalid."""
    match = re.fullmatch(r"(\d{1,12})(?:\.0+)?([KMGT]?)", text.strip())
    return int(match[1]) * _UNITS.get(match[2], 1) if match else None


def exit_and_signal(text: str) -> int | None:
    """Parse `code:signal` as one number: the code times SIGNALS, plus the signal."""
    match = re.fullmatch(r"(\d{1,9})(?::(\d{1,3}))?", text.strip())
    return int(match[1]) * SIGNALS + int(match[2] or 0) if match else None


def span_s(text: str) -> int | None:
    """Return the seconds of `[D-]HH:MM:SS[.fff]` or `MM:SS.fff`, also negative; None if invalid."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        return None
    sign, days, hours, minutes, seconds = match.groups()
    total = int(days or 0) * 86_400 + int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return -total if sign else total


def excluded_hosts(line: str) -> str:
    """Return the host list of `--exclude` or `-x` in a submit line; "" without any.

    Options after the script's name are the script's own.
    """
    if not _EXCLUDES.search(line):
        return ""
    words = line.split()
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word = words[at]
        after = words[at + 1] if at + 1 < len(words) else ""
        name, equals, value = word[2:].partition("=") if word[1] == "-" else ("", "", "")
        if word[1] != "-":
            value = word[2:].removeprefix("=")
            takes = not value and word[1] in _SHORT_VALUED
            name = "exclude" if word[1] == "x" else ""
        else:
            takes = not equals and name not in _SWITCHES
        if name == "exclude":
            return _list(value or after)
        at += 2 if takes and not after.startswith("-") else 1
    return ""


def _list(text: str) -> str:
    """Return a host list; "" for a file of hosts."""
    text = text.strip("'\"")
    return "" if "/" in text else text


def _gpus(parts: Any) -> int | None:
    of_all: int | None = None
    typed = 0
    for name, number in parts:
        if name != "gres/gpu" and not name.startswith("gres/gpu:"):
            continue
        count = parse_count(number)
        if count is None:
            return None
        if name == "gres/gpu":
            of_all = max(of_all or 0, count)
        else:
            typed += count
    return typed if of_all is None else of_all


SECOND_NS = 10**9
EARLIEST_US = 946_684_800_000_000  # 2000-01-01: before Slurm; some versions write 1970 for "never"
LATEST_US = 4_102_444_800_000_000  # 2100-01-01: later times are invalid

LOCAL = "%Y-%m-%dT%H:%M:%S"
NAIVE = "without a zone"
ZONED = "with a zone"
EPOCH = "as seconds"


class SacctTimes(NamedTuple):
    """Times of a column.

    `ns`: null if missing or invalid. `late_ns`: the later reading of a time that is ambiguous in
    the zone, else null. `wrong`: an invalid text; `skipped`: a time that the zone skips. `early`: a
    time before any Slurm, and thus unset; `forms`: number of texts of each format.
    """

    ns: pl.Series
    late_ns: pl.Series
    wrong: pl.Series
    skipped: pl.Series
    early: pl.Series
    forms: dict[str, int]


def parse_times(column: pl.Series, zone: str) -> SacctTimes:
    """Parse a column of texts; words such as Unknown are no time."""
    local = column.str.to_datetime(LOCAL, strict=False, time_unit="us")
    rest = (local.is_null() & column.is_not_null()).arg_true()
    texts = column.gather(rest).str.strip_chars()
    if len(rest):  # words, other forms, or blanks around a time
        texts = texts.set(texts.is_in(NOTHING), None)
        stripped = texts.str.to_datetime(LOCAL, strict=False, time_unit="us")
        local = local.scatter(rest, stripped)
        texts = texts.set(stripped.is_not_null(), None)
    us, late_us, skipped = _localise(local, zone)
    forms = {NAIVE: len(local) - local.null_count()}
    wrong = none = _false(column)
    if texts.null_count() < len(texts):
        epoch_us = (
            texts.cast(pl.Int64, strict=False).clip(-1, LATEST_US // 1_000_000 + 1) * 1_000_000
        )
        offsets = texts.str.replace("Z$", "+00:00").str.replace(r"([+-]\d\d):?(\d\d)$", "$1:$2")
        zoned = offsets.str.to_datetime(
            LOCAL + "%:z", strict=False, time_unit="us", time_zone="UTC"
        )
        parsed = epoch_us.zip_with(epoch_us.is_not_null(), zoned.to_physical())
        for form, some in ((EPOCH, epoch_us), (ZONED, zoned)):
            forms[form] = len(some) - some.null_count()
        given = texts.is_not_null()
        us = us.scatter(rest.filter(given), parsed.filter(given))
        wrong = none.scatter(rest.filter(given & parsed.is_null()), True)
    early = none
    if not us.is_between(EARLIEST_US, LATEST_US).all():
        early = (us < EARLIEST_US).fill_null(value=False)
        late = (us > LATEST_US).fill_null(value=False)
        us = us.set(early | late, None)
        wrong = wrong | late
    used = {form: count for form, count in forms.items() if count}
    return SacctTimes(us * 1000, late_us * 1000, wrong, skipped, early, used)


def _localise(local: pl.Series, zone: str) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Return microseconds, the later ones of ambiguous times, and which times do not exist."""
    if zone == "UTC":
        return (local.to_physical(), _false(local).cast(pl.Int64).clear(len(local)), _false(local))
    first, last = (
        local.dt.replace_time_zone(zone, ambiguous=which, non_existent="null").to_physical()
        for which in ("earliest", "latest")
    )
    return first, last.set(first == last, None), local.is_not_null() & first.is_null()


def _false(column: pl.Series) -> pl.Series:
    """Return False for each row."""
    return pl.Series([False]).new_from_index(0, len(column))
