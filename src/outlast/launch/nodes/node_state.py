"""State of a node's launcher in a file of its host, for probes of the scheduler.

| file            | alive                                  | ready                               |
|-----------------|----------------------------------------|-------------------------------------|
| none            | yes: it starts, or waits for the nodes | no                                  |
| beat is fresh   | yes                                    | if the controller has answered      |
|                 |                                        | within the agent's lease            |
| beat is old     | no: the launcher's event loop is stuck | no                                  |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from outlast import config
from outlast.atomic_files import replace_file

BEAT_S = 5.0
STUCK_S = 60.0
_FILE_BYTES_MAX = 4096


class NodeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of the file."""

    version: int = 1
    host: str
    run: str
    beat_ns: int  # CLOCK_BOOTTIME of this host: it cannot be set
    silence_s: float  # since the controller has last answered
    lease_s: float


class StateFile:
    """The file while this node's agent serves; without OUTLAST_NODE_STATE, nothing is written."""

    def __init__(self, host: str, run: str, lease_s: float) -> None:
        path = config.process_environment().get(config.STATE_VARIABLE)
        self._path = Path(path) if path else None
        self._host, self._run, self._lease_s = host, run, lease_s

    async def keep(self, silence_s: Callable[[], float]) -> None:
        """Write the file every BEAT_S; remove it when cancelled."""
        if self._path is None:
            return
        try:
            while True:
                state = NodeState(
                    host=self._host,
                    run=self._run,
                    beat_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME),
                    silence_s=silence_s(),
                    lease_s=self._lease_s,
                )
                with contextlib.suppress(OSError):  # a full disk: the probe finds an old beat
                    replace_file(self._path, msgspec.json.encode(state), durable=False)
                await asyncio.sleep(BEAT_S)
        finally:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def why_not_alive(path: Path) -> str:
    """Return why the launcher that writes `path` is stuck; "" if it is not."""
    try:
        state, age_s = _read(path)
    except FileNotFoundError:
        return ""  # it has limits of its own until all nodes are there
    except (OSError, msgspec.DecodeError) as error:
        return f"{path} cannot be read: {error}"
    return f"the launcher of {state.host} is stuck for {age_s:.0f} s" if age_s > STUCK_S else ""


def why_not_ready(path: Path) -> str:
    """Return why the node does not take part in a run; "" if it does."""
    try:
        state, age_s = _read(path)
    except FileNotFoundError:
        return "no run: the launcher starts, waits for other nodes, or has ended"
    except (OSError, msgspec.DecodeError) as error:
        return f"{path} cannot be read: {error}"
    if age_s + state.silence_s > state.lease_s + 2 * BEAT_S:
        return f"the controller has not answered {state.host} for {age_s + state.silence_s:.0f} s"
    return ""


def _read(path: Path) -> tuple[NodeState, float]:
    with path.open("rb") as file:
        state = msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=NodeState)
    return state, (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - state.beat_ns) / 1e9
