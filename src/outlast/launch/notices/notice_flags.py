"""Flags of notices: signals, a watched file, and the metadata of a cloud."""

from __future__ import annotations

import signal
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable

import msgspec

from outlast import quantities
from outlast.config import JOB_SIGNALS
from outlast.errors import ConfigError, UsageError
from outlast.launch.notices.cloud_metadata import CLOUDS

NOTICE_S = 30.0  # as Kubernetes and spot machines of Google Cloud have it


class NoticeFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of notices on each host. `after_s`: from a notice without a time to the deadline."""

    signals: tuple[str, ...] = ()  # SIGTERM, ...
    after_s: float = NOTICE_S
    file: str = ""
    cloud: str = ""
    address: str = ""  # of the metadata service, in place of the cloud's own


def add_notice_flags(add: Callable[..., object]) -> None:
    """Add the flags to the parser."""
    add(
        "--notice-signal",
        "--notice_signal",
        type=_signals,
        default=(),
        metavar="NAMES",
        help="Take the first of these signals (TERM,USR1,USR2,HUP,INT,QUIT) to a launcher or to one"
        " of its workers as a notice that this host will be lost (default: none).",
    )
    add(
        "--notice-time",
        "--notice_time",
        type=_seconds,
        default=NOTICE_S,
        metavar="TIME",
        help="Time from a signal of --notice-signal, or from a --notice-file without a time, to the"
        " loss of the host (default 30s).",
    )
    add(
        "--notice-file",
        "--notice_file",
        default="",
        metavar="FILE",
        help="File that means, from its appearance on, that this host will be lost. Its first line"
        " may have a time: 90s, 17:30 or 2026-11-28T17:30:00Z (default: no file is watched).",
    )
    add(
        "--notice-cloud",
        "--notice_cloud",
        type=_cloud,
        default=("", ""),
        metavar="aws|gcp|azure",
        help="Ask the metadata service of this machine's cloud every 5 s whether the machine will"
        " be stopped. NAME=http://HOST:PORT asks another address (default: none is asked).",
    )


def read(given: Namespace) -> NoticeFlags:
    """Return the flags of notices. Raises UsageError."""
    file = given.notice_file
    if "\0" in file:
        raise UsageError("--notice-file: a path has no zero bytes")
    cloud, address = given.notice_cloud
    return NoticeFlags(
        signals=given.notice_signal,
        after_s=given.notice_time,
        file=file,
        cloud=cloud,
        address=address,
    )


def _signals(text: str) -> tuple[str, ...]:
    known = {each.name for each in JOB_SIGNALS}
    names = [f"SIG{one.strip().upper().removeprefix('SIG')}" for one in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ArgumentTypeError(f"{unknown[0]} is none of {', '.join(sorted(known))}")
    return tuple(dict.fromkeys(names))


def numbers(names: tuple[str, ...]) -> tuple[signal.Signals, ...]:
    """Return the signals of these names."""
    return tuple(signal.Signals[name] for name in names)


def stop_numbers(names: tuple[str, ...]) -> list[signal.Signals]:
    """Return the signals of these names, without those that are ignored, as by nohup."""
    return [each for each in numbers(names) if signal.getsignal(each) is not signal.SIG_IGN]


def _seconds(text: str) -> float:
    try:
        found = quantities.measured(quantities.SECONDS, text, text, "30s")
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise ArgumentTypeError(f"{text!r} is not a duration above zero")
    return found


def _cloud(text: str) -> tuple[str, str]:
    cloud, _, address = text.partition("=")
    if cloud not in CLOUDS:
        raise ArgumentTypeError(f"{cloud!r} is none of {', '.join(CLOUDS)}")
    if address and not address.startswith("http://"):
        raise ArgumentTypeError(f"{address!r} is no address, as in {cloud}=http://127.0.0.1:8080")
    return cloud, address.removeprefix("http://").rstrip("/")
