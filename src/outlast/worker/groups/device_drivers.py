"""Drivers of communicators, one for each kind of device, and the choice between NCCL's two.

A driver opens the communicators of a generation, and severs them when the generation is over. What
runs on them is torch's; they close when the last reference to them is dropped.

| driver        | `open`                      | `cut` wakes operations | `abort` wakes operations |
|---------------|-----------------------------|------------------------|--------------------------|
| `GlooDevice`  | connects                    | yes, by `shutdown(2)`  | no: gloo's does nothing  |
| `nccl-legacy` | connects at first collective| no                     | yes; may hang            |
| `nccl2`       | connects                    | no                     | yes; may hang            |

The two NCCL drivers were never run: that needs GPUs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import ErrorType, PrefixStore

from outlast import config
from outlast.errors import ConfigError
from outlast.worker.groups.rendezvous import JoinStore

if TYPE_CHECKING:
    from outlast.worker.groups.stable_group import StableGroup


class DeviceDriver(Protocol):
    """Communicators for the tensors of one kind of device."""

    name: str
    device: torch.device
    kind: dist.ProcessGroup.BackendType

    def open(self, store: JoinStore, rank: int, size: int, timeout_s: float) -> Any:
        """Return a torch backend whose ranks meet in `store`. `timeout_s` bounds each of its
        operations. Raises RuntimeError when a peer is lost."""
        ...

    def cut(self, peers: Collection[str]) -> int:
        """Shut down all connections to `peers` and return their number. Thread-safe."""
        ...

    def abort(self, backend: Any) -> threading.Thread | None:
        """Wake the operations of `backend`. Return the thread that does so, if one is needed."""
        ...


@functools.cache
def has_nccl() -> bool:
    """Return whether this torch has NCCL and this process a GPU."""
    return torch.cuda.is_available() and dist.is_nccl_available()


class NcclDriver:
    """Driver for NCCL's class "nccl-legacy" (in torch before 2.15 "nccl"), or for "nccl2"."""

    device = torch.device("cuda")
    kind = dist.ProcessGroup.BackendType.NCCL

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, store: JoinStore, rank: int, size: int, timeout_s: float) -> Any:
        """Return an NCCL backend; "nccl-legacy" connects at its first collective."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001 - no public name
        store.extend(timeout_s)
        own: Any = PrefixStore("nccl", store)
        if self.name == "nccl2":
            current = torch.device("cuda", torch.cuda.current_device())
            # torch's stubs lack some constructors
            return dist.ProcessGroupNCCL2(own, rank, size, options, current)  # pyright: ignore[reportAttributeAccessIssue]
        return dist.ProcessGroupNCCL(own, rank, size, options)

    def cut(self, peers: Collection[str]) -> int:  # noqa: ARG002
        """Return 0: NCCL's connections are not only sockets of this process."""
        return 0

    def abort(self, backend: Any) -> threading.Thread:
        """Start the abort in a thread of its own, because NCCL's abort may hang; the worker is then
        killed and replaced."""
        thread = threading.Thread(target=backend.abort, name="outlast-nccl-abort", daemon=True)
        thread.start()
        return thread


def nccl_name() -> str:
    """Return the NCCL driver to use: "nccl-legacy", or "nccl2" where TORCH_DIST_USE_NCCL2=1.

    From torch 2.15 on, `nccl` means nccl2 unless that variable is 0. Outlast defaults to the older
    class: it connects at its first collective, where an abort can end the wait for a lost peer.
    nccl2 connects in its constructor. Raises ConfigError where this torch has no nccl2.
    """
    if not config.wants_nccl2():
        return "nccl-legacy"
    if not hasattr(dist, "ProcessGroupNCCL2"):
        raise ConfigError(
            f"{config.NCCL2_VARIABLE}=1 requests nccl2, which torch {torch.__version__} lacks;"
            f" unset {config.NCCL2_VARIABLE} or install torch 2.15"
        )
    return "nccl2"


def nccl_drivers() -> list[DeviceDriver]:
    """Return the driver for CUDA tensors, or an empty list without a GPU."""
    return [NcclDriver(nccl_name())] if has_nccl() else []


class BackendView:
    """Placeholder for the backend of one device. No operation runs on it."""

    supports_shrinking = supports_coalescing = supports_time_estimate = False

    def __init__(self, group: StableGroup, device: torch.device) -> None:
        self._group = group
        self.device = torch.device(device)
        self.supports_coalescing = self.device.type == "cuda"
        self.supports_splitting = self.device.type == "cpu" and not group.supports_reconfigure

    def name(self) -> str:
        """Return the name of the backend."""
        return self._group.name()

    def rank(self) -> int:
        """Return this rank in the group."""
        return self._group.place.rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._group.place.size

    def supports_tensor_alloc(self, device: torch.device) -> bool:  # noqa: ARG002
        """Return whether the backend allocates tensors itself."""
        return False

    @property
    def supports_reconfigure(self) -> bool:
        """True where torch's reconfigure can replace the members of the group."""
        return self._group.supports_reconfigure

    def get_error(self) -> ErrorType:
        """Return SUCCESS, as gloo does: each operation raises its own error."""
        return ErrorType.SUCCESS

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        """Send tensors to a rank of the group."""
        return self._group.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        """Receive tensors from a rank of the group."""
        return self._group.recv(tensors, rank, tag)

    def abort(self) -> None:
        """End the operations of the group."""
        self._group.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives."""
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout
