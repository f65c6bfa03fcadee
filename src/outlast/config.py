"""Every setting, validated once. The only module that reads environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outlast.errors import ConfigError

WORKER_VARIABLE = "OUTLAST_WORKER"


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deadlines, budgets and thresholds of one run. Seconds unless the name says otherwise."""

    hello_s: float = 600.0  # spawn -> init()
    status_s: float = 30.0  # Close -> the last answer; then the silent are fenced
    join_s: float = 600.0  # seat -> ready (build, compile, dry steps)
    connect_s: float = 30.0  # groups of a generation
    transfer_s: float = 300.0  # state copies of a generation
    stop_s: float = 30.0  # a drain; then everything is killed
    lease_s: float = 10.0  # an agent that cannot renew kills its workers before this
    shared_s: float = 60.0  # making a shared value
    hang_floor_s: float = 10.0
    hang_ceiling_s: float = 600.0
    hang_factor: float = 8.0  # times the slowest recent phase
    attempts_max: int = 3  # generations in a row that fail at the same phase
    respawns_max: int = 100  # workers started beyond the first ones, in the run's life

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"limit {name} must be above zero, not {getattr(self, name)}")
        if self.hang_ceiling_s < self.hang_floor_s:
            raise ConfigError(
                f"hang_ceiling_s ({self.hang_ceiling_s}) is below"
                f" hang_floor_s ({self.hang_floor_s})"
            )


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a launcher tells a worker from birth, in one environment variable."""

    run: str
    token: str  # hex
    term: int
    agent: str
    incarnation: int
    worker: str
    seat: int  # the seat it is meant for; -1: a spare
    world: int
    control_fd: int
    page_fd: int
    run_dir: str
    checkpoint_every: int  # committed steps; 0: only when draining
    faults: tuple[str, ...]  # parsed by worker/faults.py
    fault_seed: int
    limits: Limits


def worker_settings(environment: Mapping[str, str] = os.environ) -> WorkerSettings | None:
    """What the launcher said, or None when this process was started by hand.

    Raises ConfigError when the variable is damaged.
    """
    text = environment.get(WORKER_VARIABLE)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=WorkerSettings)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{WORKER_VARIABLE} is damaged: {error}") from error


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The index of this process's device on its host, from birth; 0 without a launcher."""
    return int(environment.get("LOCAL_RANK", "0"))


def set_rank(seat: int, world: int) -> None:
    """Let libraries that read torchrun's variables see the seat that this worker has taken."""
    os.environ.update(RANK=str(seat), WORLD_SIZE=str(world))


def child_environment(
    extra: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> dict[str, str]:
    """This process's environment over `defaults`, and `extra` over both, for a child process."""
    return {**(defaults or {}), **os.environ, **extra}


def python_executable(environment: Mapping[str, str] = os.environ) -> str:
    """PYTHON_EXEC, as torchrun has it, or this interpreter."""
    return environment.get("PYTHON_EXEC", sys.executable)


def gloo_interface(environment: Mapping[str, str] = os.environ) -> str:
    """GLOO_SOCKET_IFNAME, or "" (then loopback)."""
    return environment.get("GLOO_SOCKET_IFNAME", "")


def run_dir_default() -> Path:
    return Path("runs")
