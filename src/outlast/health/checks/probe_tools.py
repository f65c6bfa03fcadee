"""Reading of kernel files and of the output of tools, for probes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from outlast.config import child_environment
from outlast.health.check_contract import AbsentError

TOOL_S = 20.0  # the probe's own deadline comes before, as a rule
TEXT_MAX = 16 << 20


class ToolError(Exception):
    """A tool failed; the message is what it said."""


def read_text(path: Path) -> str | None:
    """A small file of /proc or /sys; None where there is none, or the device does not say."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """The first number of such a file."""
    words = (read_text(path) or "").split()
    try:
        return int(words[0], 0) if words else None
    except ValueError:
        return None


def list_names(path: Path) -> list[str]:
    """What is in a directory, sorted; nothing where there is none."""
    try:
        return sorted(each.name for each in path.iterdir())
    except OSError:
        return []


def run_tool(
    command: list[str], *, codes: tuple[int, ...] | None = (0,), within_s: float = TOOL_S
) -> str:
    """What a tool writes to stdout. `codes`: the exit codes that are none of a failure; None: all.
    Raises AbsentError where it is not installed, ToolError where it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=within_s, check=False,
            env=child_environment({"LC_ALL": "C", "TZ": "UTC"}),
        )  # fmt: skip
    except FileNotFoundError as error:
        raise AbsentError(f"{command[0]} is not installed") from error
    if codes is not None and done.returncode not in codes:
        why = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise ToolError(f"{command[0]} ended with {done.returncode}: {why[:300] or 'no word'}")
    return done.stdout[:TEXT_MAX].decode("utf-8", "replace")
