"""Copies from a CUDA device that run beside what it computes.

Written against PyTorch's documentation and never run on hardware: no machine of this project had
a device when it was written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from outlast.errors import StorageError, UsageError


class Device:
    """One device's own stream for copies, and a thread that waits for them to end."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied = _event()
        self._waiting = ThreadPoolExecutor(1, "outlast-copied")

    def pin(self, memory: torch.Tensor) -> None:
        """Let the device write to this memory directly. Raises StorageError when it must not."""
        code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if code:
            raise StorageError(
                f"CUDA refuses to pin an arena of {memory.numel()} bytes (error {code}); nothing"
                " was saved; raise the limit of locked memory (ulimit -l)"
            )

    def unpin(self, memory: torch.Tensor) -> None:
        _runtime().cudaHostUnregister(memory.data_ptr())

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What is copied inside begins once what was queued before has ended."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied = self._stream.record_event(_event())

    def fence(self) -> None:
        """What is queued from here on begins once the copies have ended. Waits for nothing."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)

    def after(self, do: Callable[[], None], failed: Callable[[str], None]) -> Future[None]:
        """Call `do` from a thread once the copies have ended, or `failed` with the reason why they
        never will."""
        copied = self._copied

        def wait() -> None:
            try:
                copied.synchronize()
            except RuntimeError as error:
                failed(f"the copies from {self._stream.device} failed: {error}")
            else:
                do()

        return self._waiting.submit(wait)

    def close(self) -> None:
        """Take nothing more to wait for. Waits for nothing itself."""
        self._waiting.shutdown(wait=False)


def only_device(devices: Iterable[torch.device]) -> torch.device | None:
    """The CUDA device among these, or None: other devices' copies are waited for.

    Raises UsageError when there are several: a rank has one.
    """
    found = sorted(str(device) for device in devices if device.type == "cuda")
    if len(found) > 1:
        raise UsageError(
            f"a rank's tensors are, or were at earlier saves, on {len(found)} CUDA devices"
            f" ({', '.join(found)}); nothing was saved; keep them on one"
        )
    return torch.device(found[0]) if found else None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # whoever waits leaves the processor to the training


def _runtime() -> Any:
    runtime = torch.cuda.cudart()
    assert runtime is not None, "a tensor is on a CUDA device"
    return runtime
