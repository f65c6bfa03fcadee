"""Checks of the host before a run starts."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from outlast import config
from outlast.checkpoint.keeper import arena
from outlast.checkpoint.replicas.replica_sender import BYTES_PER_S_MIN
from outlast.checkpoint.upkeep.durable_targets import DurableRule, DurableTarget, open_targets
from outlast.errors import ConfigError, OutlastError, RefusedError
from outlast.launch.host.worker_environment import free_port
from outlast.launch.torchrun.worker_commands import is_unmodified
from outlast.launch.torchrun_arguments import RunPlan
from outlast.text_formatting import plural

PAGE_RESERVED_BYTES = 2 << 20  # initial shared memory per worker
REQUEST_S = 30.0  # timeout of a request to durable storage; drains are retried
_SIOCGIFADDR = 0x8915


def check(plan: RunPlan) -> list[DurableTarget]:
    """Check the host; return the plan's durable targets, in order.

    Raises ConfigError or StorageError with the failed check and its remedy. Unresponsive targets
    are an error only if none responds and the run directory is new: otherwise they may not be
    needed.
    """
    config.check_torch()
    check_interface(config.gloo_interface())
    _check_memory(plan.world + plan.spares)
    _check_address(plan.master_addr)
    _check_peer_rate(plan)
    return _targets(plan.durable, Path(plan.run_dir))


def check_node(plan: RunPlan) -> list[DurableTarget]:
    """Check a host of a run of several nodes; return and raise as `check` does."""
    config.check_torch()
    _check_group(plan)
    check_interface(config.gloo_interface())
    _check_memory(plan.ranks_per_node + plan.spares)
    _check_peer_rate(plan)
    return _targets(plan.durable, Path(plan.run_dir))


def _check_group(plan: RunPlan) -> None:
    """Raise ConfigError for spare nodes of a script that does not name Outlast: torchrun would give
    them ranks, in a larger world."""
    if plan.node.spare_nodes and is_unmodified(plan.command):
        nodes = plan.node.nodes
        raise ConfigError(
            f"--nnodes {nodes}:{plan.node.total}: {plan.script} does not name outlast, and an"
            " unmodified script has neither spare nodes nor a world that changes; nothing was"
            f" started; give --nnodes {nodes}, or call outlast.init() in it (if its modules do,"
            " write `import outlast` into it)"
        )


def check_interface(names: str) -> None:
    """Raise ConfigError unless all comma-separated GLOO_SOCKET_IFNAME have an IPv4 address."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, names.split(",")):
        if name not in known:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which this host does not have"
                f" (it has {', '.join(known)}); nothing was started; correct or unset it"
            )
        if not _has_address(name):
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME names {name!r}, which has no IPv4 address; nothing was"
                " started; bring it up, or name another"
            )


def _has_address(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return False
    return True


def _check_memory(workers: int) -> None:
    needed_bytes = workers * PAGE_RESERVED_BYTES
    available = arena.tightest_limit()
    if available.free_bytes < needed_bytes:
        raise ConfigError(
            f"the pages of {workers} workers need {needed_bytes} bytes of memory, and only"
            f" {available.free_bytes} of {available.scope} are free; nothing was started; free"
            " memory, or raise the container's limit"
        )


def _check_address(address: str) -> None:
    try:
        free_port(address)
    except OSError as error:
        reason = "does not resolve" if isinstance(error, socket.gaierror) else "is not this host's"
        raise ConfigError(
            f"--master-addr {address} {reason} ({error.strerror}); nothing was started;"
            " leave it out: there is one node, and its own address will do"
        ) from error


def _check_peer_rate(plan: RunPlan) -> None:
    rate = plan.peer_rate_bytes_per_s
    peers = max(plan.copies, plan.parity) - 1
    if rate is None:
        return
    if not peers:
        raise ConfigError(
            "--peer-rate: without copies nothing is sent to peers; nothing was started; give"
            " --copies 2 as well, or leave it out"
        )
    least = plan.world * peers * int(BYTES_PER_S_MIN)
    if rate < least:
        raise ConfigError(
            f"--peer-rate of {rate / 1e6:g} MB/s: {plural(plan.world, 'rank')} send to"
            f" {plural(peers, 'peer')} each, and what moves at less than"
            f" {BYTES_PER_S_MIN / 1e6:g} MB/s is abandoned; nothing was started; give at least"
            f" {least / 1e6:g}MB/s"
        )


def _targets(plan: Sequence[DurableRule], run_dir: Path) -> list[DurableTarget]:
    try:
        targets, silent = open_targets(plan, run_dir / "checkpoints", REQUEST_S)
    except (ConfigError, RefusedError) as error:
        raise _refusal(error) from error
    if silent and len(silent) == len(targets) and not (run_dir / "run.json").is_file():
        raise _refusal(silent[0]) from silent[0]
    return targets


def _refusal(error: OutlastError) -> OutlastError:
    return type(error)(f"--durable {error}; nothing was started")
