"""The flags of `outlast run` that watch the node and the script."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

from outlast import amounts
from outlast.errors import ConfigError, UsageError


def add(add: Callable[..., object]) -> None:
    """Give the parser its flags."""
    add(
        "--on-unrepeatable",
        "--on_unrepeatable",
        choices=("stop", "warn"),
        default="stop",
        help="When a step changes what nobody protects, or gives two results from one state: end"
        " the run and name it (stop, the default), or say so and go on.",
    )
    add(
        "--check-every",
        "--check_every",
        type=_seconds,
        default=0.0,
        metavar="TIME",
        help="Have `outlast check` look at this node every so often, as in 5min; what it finds is"
        " an event.",
    )
    add(
        "--check-settings",
        "--check_settings",
        default="",
        metavar="FILE",
        help="What the node should have, and checks of one's own (see docs/check.md).",
    )
    add(
        "--migrate-on",
        "--migrate_on",
        choices=("now", "drain"),
        default="",
        help="Move a rank to a warm spare when a check finds its GPU losing jobs now, or (drain)"
        " also where it should only leave.",
    )


def refuse(given: Namespace) -> None:
    """Raises UsageError for flags that would do nothing, and for a file that is not there."""
    for flag in ("check_settings", "migrate_on"):
        if getattr(given, flag) and not given.check_every:
            name = flag.replace("_", "-")
            raise UsageError(f"--{name} needs --check-every: nothing looks at the node else")
    if given.check_settings:
        path = Path(given.check_settings)
        if not path.is_file():
            raise UsageError(f"--check-settings {path}: no such file; nothing was started")
        given.check_settings = str(path.absolute())


def _seconds(text: str) -> float:
    try:
        found = amounts.measured(amounts.SECONDS, text, text, "5min")
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise ArgumentTypeError(f"{text!r} is no time: say 5min, or leave it out")
    return found
