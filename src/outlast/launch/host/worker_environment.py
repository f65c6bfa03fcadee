"""Worker environment variables and error files."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from outlast import config
from outlast.launch.host.reaper import MARK_VARIABLE
from outlast.launch.template.template_frames import PER_WORKER
from outlast.launch.torchrun_arguments import RunPlan

# A spare must have no variable that implies a rank; future torch versions may read more.
_SEAT_VARIABLES = ("RANK", "ROLE_RANK")
_SEAT_VARIABLES_OF_NODES = ("LOCAL_RANK", "GROUP_RANK")


def worker_environment(
    plan: RunPlan,
    settings: config.WorkerSettings,
    mark: str,
    local_rank: int,
    master_port: int,
    restart_count: int,
    error_file: str,
) -> dict[str, str]:
    """Return the environment of one worker; a spare (`settings.seat` -1) has no RANK."""
    rank = str(settings.seat)
    environment = {
        **common_environment(plan),
        "RANK": rank,
        "ROLE_RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(max(0, settings.seat) // settings.ranks_per_node),
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_ERROR_FILE": str(Path(error_file).absolute()),  # the script may chdir
        config.WORKER_VARIABLE: msgspec.json.encode(settings).decode(),
        MARK_VARIABLE: mark,
    }
    if settings.seat < 0 or settings.joins:
        environment[config.TOP_VARIABLE] = "1"
    if settings.seat < 0:
        several = _SEAT_VARIABLES_OF_NODES if plan.node.is_several else ()
        for name in (*_SEAT_VARIABLES, *several):
            environment.pop(name)
    return environment


def common_environment(plan: RunPlan) -> dict[str, str]:
    """Return the variables that all workers share."""
    world = str(plan.world)
    extra = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(plan.ranks_per_node),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": plan.role,
        "GROUP_WORLD_SIZE": str(plan.node.nodes),
        "MASTER_ADDR": plan.master_addr,
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(plan.stop_signals),
        "TORCHELASTIC_USE_AGENT_STORE": str(plan.agent_store),
    }
    defaults = {"PYTHONHASHSEED": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    if plan.world > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # torchrun's default; same results on every worker
    environment = config.child_environment(extra, defaults)
    for name in (*PER_WORKER, MARK_VARIABLE, config.TOKEN_VARIABLE):
        environment.pop(name, None)
    return environment


def free_port(address: str) -> int:
    """Return a TCP port that is currently free on `address`.

    Raises OSError if the address does not belong to this host, or gaierror, a subclass, if it does
    not resolve.
    """
    found = socket.getaddrinfo(address.strip("[]"), 0, type=socket.SOCK_STREAM)
    family, _, _, _, name = found[0]
    with socket.socket(family) as probe:
        probe.bind(name)
        return int(probe.getsockname()[1])


ERROR_FILE_NAME = "error.json"
SIZE_BYTES_MAX = 1 << 20
TEXT_LENGTH_MAX = 64 << 10


class ErrorFile(NamedTuple):
    """Failure recorded by a worker."""

    message: str
    traceback: str  # "" if not recorded
    t_ns: int  # Unix time, a whole number of seconds (torch's resolution); 0 if missing


def read_error_file(path: Path) -> ErrorFile | None:
    """Return the recorded failure, or None if there is no readable record.

    The file is untrusted. Files above SIZE_BYTES_MAX and JSON without a schema of torch are
    ignored. Torch's two schemas: ``message`` as an object (``message``, ``extraInfo``) or as a
    string.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_BYTES_MAX + 1)
        if len(data) > SIZE_BYTES_MAX:
            return None
        content = msgspec.json.decode(data)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    message = content.get("message")
    if isinstance(message, str):
        return _error_file(message, content)
    if isinstance(message, dict) and isinstance(message.get("message"), str):
        extra = message.get("extraInfo")
        return _error_file(message["message"], extra if isinstance(extra, dict) else {})
    return None


def _error_file(message: str, extra: dict[str, Any]) -> ErrorFile:
    traceback = extra.get("py_callstack")
    return ErrorFile(
        message[:TEXT_LENGTH_MAX],
        traceback[-TEXT_LENGTH_MAX:] if isinstance(traceback, str) else "",
        _unix_ns(extra.get("timestamp")),
    )


def _unix_ns(value: object) -> int:
    text = str(value)
    is_plausible = text.isascii() and text.isdecimal() and len(text) <= 12
    return int(text) * 1_000_000_000 if is_plausible else 0
