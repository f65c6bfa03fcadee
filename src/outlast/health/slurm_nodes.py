"""Nodes as Slurm reports them: states, our drains and their budget; every call has a deadline."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from outlast.config import child_environment
from outlast.errors import OutlastError

PREFIX = "outlast: "
REASON_MAX = 200  # characters


class DrainedNode(NamedTuple):
    """Node whose drain reason begins with our prefix.

    `since_ns`: None if Slurm does not report the time.
    """

    node: str
    since_ns: int | None


def drain_allowance(nodes: int, percent: float) -> int:
    """Return the number of nodes that may be drained within the window: the share, at least one.

    Rounded down; without the minimum a fleet of twenty nodes could never drain any.
    """
    return max(1, int(nodes * percent / 100))


def recently_drained(drained: Iterable[DrainedNode], now_ns: int, window_s: float) -> set[str]:
    """Return the nodes drained by us within the window, or at an unknown time."""
    begin_ns = now_ns - round(window_s * 1e9)
    return {one.node for one in drained if one.since_ns is None or one.since_ns > begin_ns}


def drain_reason(detail: str) -> str:
    """Return a drain reason for Slurm: one line without characters special to a shell or sinfo."""
    plain = "".join(c if c.isalnum() or c in " .,:;/()%+-_=" else " " for c in detail)
    return (PREFIX + " ".join(plain.split()))[:REASON_MAX]


def is_our_reason(text: str) -> bool:
    """Return whether a drain reason was written by this package."""
    return text.startswith(PREFIX)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
AWAY = {
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "DOWN",
    "FAIL",
    "FAILING",
    "MAINT",
    "MAINTENANCE",
    "FUTURE",
    "ERROR",
}
UNREGISTERED = {"UNKNOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_UP", "FUTURE"}
TEXT_MAX = 64 << 20


class SlurmError(OutlastError):
    """Slurm did not answer in time, or not as expected. Nothing was drained."""


class SlurmNode(NamedTuple):
    """State of a node.

    `states`: base states and flags; flag characters appear by name.
    """

    states: frozenset[str]
    reason: str

    @property
    def is_away(self) -> bool:
        """True for a node out of service: drained, down, failing or in maintenance."""
        return bool(self.states & AWAY)

    @property
    def is_registered(self) -> bool:
        """True if slurmctld has contact with the node."""
        return bool(self.states) and not self.states & UNREGISTERED


class SlurmFleet(NamedTuple):
    """Number of nodes, and those that this package drained."""

    nodes: int
    drained: tuple[DrainedNode, ...]


def read_node(name: str, within_s: float) -> SlurmNode:
    """Return a node's state.

    Raises SlurmError, also if slurmctld does not know the node.
    """
    answer = _answer(["scontrol", "show", "node", _checked_name(name), "-o"], within_s)
    found = re.search(r"\bState=(\S+)", answer)
    if not found:
        raise SlurmError(f"scontrol says nothing of the state of {name}; nothing was drained")
    marks = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP"}
    words = {word for word in re.split(r"[+*~#!%$@^-]", found[1].upper()) if word}
    words |= {name for mark, name in marks.items() if mark in found[1]}
    reason = re.search(r"\bReason=(.*?)(?: \[\S+@\S+\])?\s*$", answer)
    return SlurmNode(frozenset(words), reason[1] if reason else "")


def read_fleet(within_s: float) -> SlurmFleet:
    """Return the number of nodes and those that we drained. Raises SlurmError."""
    answer = _answer(["sinfo", "-h", "-N", "-o", "%N|%H|%E"], within_s)
    names: set[str] = set()
    drained: dict[str, DrainedNode] = {}
    for line in answer.splitlines():
        parts = line.split("|", 2)
        if len(parts) != 3:
            continue
        name, when, reason = (part.strip() for part in parts)
        names.add(name)  # a node has a line for each of its partitions
        if is_our_reason(reason):
            drained[name] = DrainedNode(name, _time_ns(when))
    if not names:
        raise SlurmError("sinfo names no node; nothing was drained")
    return SlurmFleet(len(names), tuple(drained.values()))


def request_drain(name: str, reason: str, within_s: float) -> None:
    """Set a node to DRAIN. Raises SlurmError."""
    _answer(
        [
            "scontrol",
            "update",
            f"NodeName={_checked_name(name)}",
            "State=DRAIN",
            f"Reason={reason}",
        ],
        within_s,
    )


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise SlurmError(f"{name!r} is no name of a node; nothing was drained")
    return name


def _time_ns(text: str) -> int | None:
    """Parse seconds, as with SLURM_TIME_FORMAT=%s, or the local time of an older Slurm."""
    if text.isdecimal():
        return int(text) * 10**9
    try:
        return int(datetime.fromisoformat(text).astimezone().timestamp()) * 10**9
    except ValueError:
        return None


def _environment() -> dict[str, str]:
    """Return the environment without SLURM_CLUSTERS.

    With it scontrol would query another cluster's node of the same name.
    """
    found = child_environment({"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"})
    found.pop("SLURM_CLUSTERS", None)
    return found


def _answer(command: list[str], within_s: float) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=within_s, check=False,
            env=_environment(),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} did not answer within {within_s:g} s; nothing was drained"
        ) from error
    except OSError as error:
        raise SlurmError(f"{command[0]}: {error.strerror}; nothing was drained") from error
    if done.returncode:
        why = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:300]
        raise SlurmError(f"{command[0]} ended with {done.returncode}: {why}; nothing was drained")
    return done.stdout[:TEXT_MAX].decode("utf-8", "replace")
