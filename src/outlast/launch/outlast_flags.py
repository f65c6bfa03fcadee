"""Flags of `outlast run` beyond torchrun's: saves, node checks and script checks."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from outlast import config, quantities
from outlast.checkpoint.replicas.replica_receiver import SENDERS_MAX
from outlast.checkpoint.upkeep import durable_targets, retention_policy
from outlast.checkpoint.upkeep.retention_policy import Keep
from outlast.errors import ConfigError, UsageError

T = TypeVar("T")


def add_save_flags(add: Callable[..., object]) -> None:
    """Give the parser its flags."""
    add(
        "--checkpoint-every",
        "--checkpoint_every",
        type=_interval,
        default=0,
        metavar="STEPS|auto",
        help="Committed steps between checkpoints on disk; auto: as costs and failures ask for;"
        " 0: only when the run is interrupted.",
    )
    add(
        "--snapshot-every",
        "--snapshot_every",
        type=_interval,
        default=0,
        metavar="STEPS|auto",
        help="Committed steps between copies in memory, from which all can begin again without the"
        " disk; 0: a checkpoint's own.",
    )
    add(
        "--copies",
        default="1",
        metavar="COUNT|xor:RANKS",
        help="How many keepers hold each rank's last saves in memory: its own, and others', where"
        " they survive both. xor:4: instead of copies, parity in groups of up to 4 ranks, for the"
        " loss of one of them, and a third of the memory.",
    )
    add(
        "--peer-rate",
        "--peer_rate",
        type=_read(lambda text: quantities.rate(text, text)),
        metavar="RATE",
        help="What goes from this host's keepers to others for --copies, at most: 1GB/s.",
    )
    add(
        "--keep",
        type=_read(retention_policy.parse_policy),
        default=Keep(),
        metavar="RULES",
        help="Which checkpoints stay: last=3,every=1000,milestone=5000,age=7d,size=10TB"
        " (default: last=2).",
    )
    add(
        "--durable",
        type=_read(durable_targets.parse_durable),
        action="append",
        default=[],
        metavar="TARGET",
        help="Where checkpoints are copied to in the background: a directory, s3://, gs:// or"
        " az://, and options after spaces: every=1000 or every=6h (one checkpoint of each such"
        " span), keep=RULES (default: those of --keep), rate=200MB/s (at most). Repeatable.",
    )
    add(
        "--on-save-failure",
        "--on_save_failure",
        choices=("warn", "stop"),
        default="warn",
        help="When a checkpoint cannot be written: warn and go on, or end the run, resumable.",
    )


def _interval(text: str) -> int:
    if text == "auto":
        return config.AUTO
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is neither a number of steps below 10^9 nor auto")
    return int(text)


def steps(text: str) -> int:
    """Return a number of steps. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is no number of steps below 10^9")
    return int(text)


def _read(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse type for a parser of ours, with its errors as usage errors."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except UsageError as error:
            raise ArgumentTypeError(str(error)) from error

    return read


def copies(text: str, world: int) -> tuple[int, int]:
    """Return the number of copies and of ranks in a parity group (0: none) of `--copies`.

    Raises UsageError with the possible values.
    """
    kind, colon, count = text.rpartition(":")
    most = min(world, SENDERS_MAX + 1)
    number = int(count) if re.fullmatch(r"-?[0-9]{1,9}", count) else None
    if number is None or (colon and kind != "xor"):
        raise UsageError(
            f"--copies {text}: neither a number of copies nor xor: and the ranks of a group; try"
            " --copies 2, or --copies xor:4"
        )
    if colon and not 2 <= number <= most:
        raise UsageError(
            f"--copies {text}: a group's parity is held by the keepers of its ranks, so that"
            f" {f'xor:2 to xor:{most} are' if most > 1 else 'none is'} possible with {world} ranks"
        )
    if not 1 <= number <= most:
        raise UsageError(
            f"--copies {text}: each is held by another rank's keeper, so that 1 to {most} are"
            f" possible with {world} ranks"
        )
    # In a pair, parity is a copy.
    return (1, number) if colon and number > 2 else (number, 0)


def add_check_flags(add: Callable[..., object]) -> None:
    """Give the parser its flags."""
    add(
        "--on-unrepeatable",
        "--on_unrepeatable",
        choices=("stop", "warn"),
        default="stop",
        help="When a step changes unprotected state, or gives two results from one state: end"
        " the run and name it (stop, the default), or warn and go on.",
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


def refuse_check_flags(given: Namespace) -> None:
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
        found = quantities.measured(quantities.SECONDS, text, text, "5min")
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise ArgumentTypeError(f"{text!r} is no duration: give 5min, for example, or leave it out")
    return found
