"""What single fields of accounting say: states, GPUs, exit codes, spans of time, excluded hosts.

All are functions of a text; `mapped` asks once for each distinct one of a column.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import polars as pl

from outlast.log_records import JOB_STATES

PENDING = "PENDING"
SIGNALS = 1000
NOTHING = ("Unknown", "None", "N/A", "None assigned", "INVALID", "(null)", "-")

_ALSO = {  # sacct's short forms, and what Slurm says of a job beside how it ends
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


def mapped(column: pl.Series, of: Callable[[str], Any], dtype: pl.DataType) -> pl.Series:
    """`of` each text; null where there is none."""
    texts = column.drop_nulls().unique()
    if texts.is_empty():
        return pl.Series(column.name, [None], dtype=dtype).new_from_index(0, len(column))
    values = pl.Series([of(text) for text in texts], dtype=dtype)
    return column.replace_strict(texts, values, default=None, return_dtype=dtype)


def state(text: str) -> str | None:
    """A job state, PENDING, or None for what is none. `CANCELLED by 1000` and `CANCELLED+` are
    CANCELLED; a cut name is the only one that begins so."""
    word, _, _ = text.strip().upper().partition(" ")
    cut = word.endswith("+")
    word = word.removesuffix("+")
    if word in STATES and not cut:
        return STATES[word] or word
    found = {STATES[name] or name for name in STATES if cut and word and name.startswith(word)}
    return found.pop() if len(found) == 1 else None


def tres_gpus(text: str) -> int | None:
    """GPUs in `billing=12,cpu=12,gres/gpu=2,gres/gpu:a100=2,node=1`: those without a type, which
    are all, or else those of all types together. None: a count that is none."""
    return _gpus(part.partition("=")[::2] for part in text.split(","))


def gres_gpus(text: str) -> int | None:
    """GPUs in `gpu:a100:2,craynetwork:1`, as old accounts have them."""
    parts = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = part.strip().removeprefix("gres:").removeprefix("gres/").split(":")
        number = words.pop() if len(words) > 1 and words[-1][:1].isdigit() else "1"
        parts.append(("gres/" + ":".join(words), number))
    return _gpus(parts)


def tres_nodes(text: str) -> int | None:
    found = re.search(r"(?:^|,)node=(\d{1,9})(?:,|$)", text)
    return int(found[1]) if found else None


def whole(text: str) -> int | None:
    """A count, as 2048 or 2K."""
    found = re.fullmatch(r"(\d{1,12})(?:\.0+)?([KMGT]?)", text.strip())
    return int(found[1]) * _UNITS.get(found[2], 1) if found else None


def exit_and_signal(text: str) -> int | None:
    """`code:signal` as one number: the code times SIGNALS, and the signal."""
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,3}))?", text.strip())
    return int(found[1]) * SIGNALS + int(found[2] or 0) if found else None


def span_s(text: str) -> int | None:
    """Seconds in `[D-]HH:MM:SS[.fff]`, or `MM:SS.fff`; negative ones too."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        return None
    sign, days, hours, minutes, seconds = found.groups()
    total = int(days or 0) * 86_400 + int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return -total if sign else total


def excluded(line: str) -> str:
    """The host list that `--exclude` or `-x` gives in a line of sbatch, srun or salloc; "" if it
    has none. What stands behind the script's name is the script's own."""
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
    """A file of hosts is none."""
    text = text.strip("'\"")
    return "" if "/" in text else text


def _gpus(parts: Any) -> int | None:
    of_all: int | None = None
    typed = 0
    for name, number in parts:
        if name != "gres/gpu" and not name.startswith("gres/gpu:"):
            continue
        count = whole(number)
        if count is None:
            return None
        if name == "gres/gpu":
            of_all = max(of_all or 0, count)
        else:
            typed += count
    return typed if of_all is None else of_all
