"""Works that torch is handed where no inner group has worked: ended from birth."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.futures import Future

from outlast.worker.groups.opaque import opaque_class


@opaque_class
class FinishedWork(dist.Work):
    """A collective that has been answered already; its result lies in the caller's tensors."""

    def __init__(self, outputs: Sequence[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002
        return True

    def get_future(self) -> Any:
        devices: list[Any] = sorted({str(t.device) for t in self._outputs if t.is_cuda})
        future: Future[list[torch.Tensor]] = Future(devices=devices) if devices else Future()
        future.set_result(self._outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def synchronize(self) -> None:
        """Nothing runs."""

    def block_current_stream(self) -> None:
        """Nothing runs."""

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source
