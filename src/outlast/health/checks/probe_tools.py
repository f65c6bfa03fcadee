"""Reading of kernel files and of the output of tools, for probes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from outlast.config import child_environment
from outlast.health.check_contract import AbsentError

TOOL_S = 20.0  # the probe's own deadline is usually shorter
TEXT_MAX = 16 << 20


class ToolError(Exception):
    """A tool failed; the message is its error output."""


def read_text(path: Path) -> str | None:
    """Return a small file of /proc or /sys; None if it is missing or unreadable."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the first number of such a file; None if there is none."""
    words = (read_text(path) or "").split()
    try:
        return int(words[0], 0) if words else None
    except ValueError:
        return None


def list_names(path: Path) -> list[str]:
    """Return the sorted names in a directory; none if it does not exist."""
    try:
        return sorted(each.name for each in path.iterdir())
    except OSError:
        return []


def run_tool(
    command: list[str], *, codes: tuple[int, ...] | None = (0,), within_s: float = TOOL_S
) -> str:
    """Run a tool and return its standard output.

    `codes`: exit codes that are no failure; None: all. Raises AbsentError if it is not installed,
    ToolError if it failed.
    """
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
