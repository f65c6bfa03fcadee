"""Environment of a worker: torchrun's variables, and Outlast's."""

from __future__ import annotations

import socket

import msgspec

from outlast import config
from outlast.launch.host.reaper import MARK_VARIABLE
from outlast.launch.torchrun_arguments import RunPlan

# A later torch may read more of them; a spare must find none that speaks of a seat.
_SEAT_VARIABLES = ("RANK", "ROLE_RANK")


def worker_environment(
    plan: RunPlan,
    settings: config.WorkerSettings,
    mark: str,
    local_rank: int,
    master_port: int,
    restart_count: int,
    error_file: str,
) -> dict[str, str]:
    """All variables of one worker; `settings.seat` -1 makes it a spare, which has no RANK."""
    world, rank = str(plan.world), str(settings.seat)
    extra = {
        "RANK": rank,
        "ROLE_RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": plan.role,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        config.WORKER_VARIABLE: msgspec.json.encode(settings).decode(),
        MARK_VARIABLE: mark,
    }
    defaults = {"PYTHONHASHSEED": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if plan.world > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # torchrun's default, and the same bits on every worker
    environment = config.child_environment(extra, defaults)
    if settings.seat < 0:
        for name in _SEAT_VARIABLES:
            environment.pop(name)
    return environment


def free_port(address: str) -> int:
    """A TCP port that is free on `address` now. Raises OSError when the address is not ours, and
    its kind gaierror when it does not resolve."""
    found = socket.getaddrinfo(address.strip("[]"), 0, type=socket.SOCK_STREAM)
    family, _, _, _, name = found[0]
    with socket.socket(family) as probe:
        probe.bind(name)
        return int(probe.getsockname()[1])
