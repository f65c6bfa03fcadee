"""Flags of `outlast run` beyond torchrun's: saves, node checks, script checks and policy."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from outlast import config, quantities
from outlast.checkpoint.replicas.replica_receiver import SENDERS_MAX
from outlast.checkpoint.upkeep import durable_targets, retention_policy
from outlast.checkpoint.upkeep.retention_policy import Keep
from outlast.controller.recovery.recovery_policy import DEFAULT
from outlast.controller.sentinels.nonfinite_rule import parse_nan
from outlast.errors import ConfigError, UsageError
from outlast.launch.notices import notice_flags
from outlast.launch.notify.notify_targets import add_notify_flag
from outlast.launch.otlp.otlp_target import add_otlp_flag
from outlast.launch.policies import policy_files

AUDIT_EVERY = 100
_PORT_MAX = 65535
T = TypeVar("T")


def add_save_flags(add: Callable[..., object]) -> None:
    """Add the save flags to the parser."""
    add(
        "--checkpoint-every",
        "--checkpoint_every",
        type=_interval,
        default=0,
        metavar="STEPS|auto",
        help="Save a checkpoint to disk every STEPS committed steps. auto: choose the interval"
        " from measured save costs and failure rates. 0 (default): save only when the run"
        " is interrupted.",
    )
    add(
        "--snapshot-every",
        "--snapshot_every",
        type=_interval,
        default=0,
        metavar="STEPS|auto",
        help="Copy the training state to host memory every STEPS committed steps. If all ranks"
        " die, the run restarts from this copy without reading the disk. auto: choose the"
        " interval. 0 (default): keep only the copy that each checkpoint makes.",
    )
    add(
        "--copies",
        default="1",
        metavar="COUNT|xor:RANKS",
        help="Number of processes that hold each rank's last saves in host memory (default 1:"
        " the rank's own keeper process). 2 or more: keepers of other ranks hold copies"
        " too, and replace a lost keeper's. xor:4: keep XOR parity in groups of up to 4"
        " ranks instead of copies. It survives the loss of one keeper a group, and needs"
        " a third of a copy's memory.",
    )
    add(
        "--peer-rate",
        "--peer_rate",
        type=_read(lambda text: quantities.rate(text, text)),
        metavar="RATE",
        help="Bandwidth limit of all transfers between keepers for --copies, for example 1GB/s"
        " (default: no limit).",
    )
    add(
        "--keep",
        type=_read(retention_policy.parse_policy),
        default=Keep(),
        metavar="RULES",
        help="Retention policy, for example last=3,every=1000,milestone=5000,age=7d,size=10TB"
        " (default: last=2). Checkpoints that no rule keeps are deleted.",
    )
    add(
        "--durable",
        type=_read(durable_targets.parse_durable),
        action="append",
        default=[],
        metavar="TARGET",
        help="Copy checkpoints in the background to a directory or a URL (s3://, gs://,"
        " az://). Options follow after spaces. every=1000 or every=6h: copy one"
        " checkpoint per 1000 steps or 6 hours (default: each). keep=RULES: retention"
        " policy there (default: that of --keep). rate=200MB/s: bandwidth limit (default:"
        " none). Repeatable.",
    )
    add(
        "--on-save-failure",
        "--on_save_failure",
        choices=("warn", "stop"),
        default="warn",
        help="If a checkpoint cannot be written: warn and continue (warn, the default), or end"
        " the run, which can be resumed (stop).",
    )


def _interval(text: str) -> int:
    if text == "auto":
        return config.AUTO
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is not a number of steps below 10^9, and not auto")
    return int(text)


def steps(text: str) -> int:
    """Return a number of steps. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ArgumentTypeError(f"{text!r} is not a number of steps below 10^9")
    return int(text)


def _read(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return an argparse type for `parse`, with its errors as ArgumentTypeError."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except (UsageError, ConfigError) as error:
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
            f"--copies {text}: give a number of copies, as in --copies 2, or xor: and the"
            " number of ranks in a parity group, as in --copies xor:4"
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
    # Parity of two ranks is a copy.
    return (1, number) if colon and number > 2 else (number, 0)


def _add_comparison_flags(add: Callable[..., object]) -> None:
    add(
        "--audit-every",
        "--audit_every",
        type=steps,
        default=AUDIT_EVERY,
        metavar="STEPS",
        help="Let replicas compare digests of all their state within STEPS committed steps, by"
        " windows in every vote (default 100; 0: only after the start and each recovery).",
    )
    add(
        "--replay-every",
        "--replay_every",
        type=steps,
        default=0,
        metavar="STEPS",
        help="Every STEPS committed steps, let each rank compute the step of another rank again and"
        " compare what both give to the reductions, so that a device which computes wrongly is"
        " found. Costs about two steps each time (default 0: never).",
    )


def add_check_flags(add: Callable[..., object]) -> None:
    """Add the flags of checks and notices to the parser."""
    _add_comparison_flags(add)
    add(
        "--on-unrepeatable",
        "--on_unrepeatable",
        choices=("stop", "warn"),
        default="stop",
        help="If a step changes state that is not protected, or is not deterministic: end the"
        " run with the variable's name (stop, the default), or warn and continue (warn).",
    )
    add(
        "--nan",
        type=_read(_nan),
        default="",
        metavar="rerun|skip:K|stop|off",
        help="If a gradient is not finite: run the step again in place, then on a warm spare's"
        " device, and stop if it is the same there (rerun, the default); skip up to K such batches"
        " in a row in place of stopping (skip:3); stop at once (stop); do not look (off).",
    )
    add(
        "--check-every",
        "--check_every",
        type=_seconds,
        default=0.0,
        metavar="TIME",
        help="Run the node checks of `outlast check` every TIME, for example 5min, and record"
        " findings as events (default: never).",
    )
    add(
        "--check-settings",
        "--check_settings",
        default="",
        metavar="FILE",
        help="TOML file with the expected hardware of the node and with custom checks for"
        " --check-every (see docs/check.md). Default: checks without expectations.",
    )
    add(
        "--migrate-on",
        "--migrate_on",
        choices=("now", "drain"),
        default="",
        help="Move a rank to a warm spare when --check-every finds that its GPU is failing"
        " (now). drain: also if the GPU should be drained when its job ends, as in Slurm."
        " Default: never.",
    )
    notice_flags.add_notice_flags(add)
    add(
        "--policy",
        type=_read(policy_files.read_policy),
        default=DEFAULT.name,
        metavar="FILE|PRESET",
        help="Recovery policy: for each class of failure the rungs in order, with conditions and"
        f" budgets. A TOML file (docs/policies.md), or {', '.join(policy_files.PRESETS)}.",
    )


def _nan(text: str) -> str:
    parse_nan(text)
    return text


def refuse_check_flags(given: Namespace) -> None:
    """Raise UsageError for flags without effect, and for a missing settings file."""
    for flag in ("check_settings", "migrate_on"):
        if getattr(given, flag) and not given.check_every:
            name = flag.replace("_", "-")
            raise UsageError(
                f"--{name} needs --check-every, which runs the node checks; nothing was started"
            )
    if given.check_settings:
        path = Path(given.check_settings)
        if not path.is_file():
            raise UsageError(f"--check-settings {path}: no such file; nothing was started")
        given.check_settings = str(path.absolute())


def _seconds(text: str) -> float:
    try:
        seconds = quantities.measured(quantities.SECONDS, text, text, "5min")
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from error
    if seconds <= 0:
        raise ArgumentTypeError(
            f"{text!r} is not a duration above zero: give 5min, for example, or omit the flag"
        )
    return seconds


def limits(given: Namespace) -> config.Limits:
    """Return the limits of `--limit` and `--shutdown-timeout`. Raises UsageError, ConfigError."""
    values: dict[str, str] = {}
    if timeout := config.torchrun_variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        values["stop_s"] = timeout
    if getattr(given, "shutdown_timeout", None) is not None:  # torch 2.11 has no such flag
        values["stop_s"] = str(given.shutdown_timeout)
    for text in given.limit:
        name, found, value = text.partition("=")
        if not found:
            raise UsageError(f"--limit {text!r} is not NAME=VALUE")
        values[name] = value
    fields = config.Limits.__struct_fields__
    if unknown := [name for name in values if name not in fields]:
        raise ConfigError(f"--limit {unknown[0]}: no such limit; known limits: {', '.join(fields)}")
    try:
        return msgspec.convert(values, config.Limits, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--limit: {error}; nothing was started") from error


class MetricsFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Places of metrics: a file, a port of `host`, a receiver of OTLP (without its secrets)."""

    file: str = ""
    port: int = -1  # 0: any free one; -1: none
    host: str = "127.0.0.1"
    otlp: str = ""

    @property
    def is_on(self) -> bool:
        """Return whether metrics were asked for."""
        return bool(self.file or self.otlp) or self.port >= 0


def add_metrics_flags(add: Callable[..., object]) -> None:
    """Add the flags of metrics and notifications to the parser."""
    add_notify_flag(add)
    add_otlp_flag(add)
    add(
        "--metrics-file",
        "--metrics_file",
        default="",
        metavar="FILE",
        help="Write metrics of the run into FILE every 5 seconds, for the textfile collector of"
        " Prometheus' node exporter (default: none; docs/metrics.md).",
    )
    add(
        "--metrics-port",
        "--metrics_port",
        type=_port,
        default=-1,
        metavar="PORT",
        help="Serve metrics of the run at http://127.0.0.1:PORT/metrics (0: any free port;"
        " default: none).",
    )
    add(
        "--metrics-host",
        "--metrics_host",
        default=MetricsFlags().host,
        metavar="ADDRESS",
        help="Address to listen on for --metrics-port (default 127.0.0.1). Whoever reaches it can"
        " read the metrics.",
    )


def metrics(given: Namespace) -> MetricsFlags:
    """Return the flags of metrics."""
    return MetricsFlags(
        file=given.metrics_file,
        port=given.metrics_port,
        host=given.metrics_host,
        otlp=given.otlp or "",
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > _PORT_MAX:
        raise ArgumentTypeError(f"{text!r} is not a port from 0 to {_PORT_MAX}")
    return int(text)
