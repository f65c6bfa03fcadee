"""Batches that are saved for their owner, and the search for the sample that spoils a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from outlast.atomic_files import replace_file
from outlast.checkpoint.format import codec
from outlast.errors import CodecError
from outlast.worker.sentinels.batch_parts import common_size, cut_rows

FOLDER = "nonfinite"
FILES_MAX = 16  # of a run directory: a model that is broken has no end of such batches
RUNS_MAX, SEARCH_S = 24, 60.0


def save_batch(run_dir: Path, step: int, rank: int, batch: Any) -> str:
    """Write a batch, encoded without pickle, to RUN_DIR/nonfinite; return where it is, or why not.

    `outlast.checkpoint.format.codec.decode` reads the file.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if sum(1 for _ in folder.iterdir()) >= FILES_MAX:
            return f"its batch was not saved, since {folder} has {FILES_MAX} already"
        path = folder / f"step-{step:06d}-rank-{rank}.batch"
        replace_file(path, codec.encode({"step": step, "rank": rank, "batch": batch}))
    except CodecError as error:
        return f"its batch cannot be saved without pickle ({error})"
    except OSError as error:
        return f"its batch could not be saved in {folder} ({error.strerror})"
    return f"its batch is in {path}"


class SampleSearch:
    """Search for the one sample of a batch whose gradient is not finite, by halves.

    `is_finite`: runs a call without the other ranks, and undoes it.
    """

    def __init__(self, is_finite: Callable[[Callable[[], Any]], bool]) -> None:
        self._is_finite = is_finite
        self._runs = 0
        self._until_s = time.monotonic() + SEARCH_S

    def describe(self, call: Callable[[], Any]) -> str:
        """Return "sample 3 of 8 alone gives it", or why that is not known."""
        size = batch_size(call)
        if not isinstance(call, partial) or size < 2:
            return "its samples were not tried one by one: no arguments with a common batch size"
        if not self._spoils(call, 0, size, size):
            return "its samples are not to blame alone: without the other ranks it is finite"
        low, high = 0, size
        while high - low > 1 and self._has_budget():
            middle = (low + high) // 2
            if self._spoils(call, low, middle, size):
                high = middle
            elif self._spoils(call, middle, high, size):
                low = middle
            else:
                return f"samples {low} to {high - 1} of {size} give it only together"
        if high - low == 1:
            return f"sample {low} of {size} (from 0) gives it alone"
        return f"one of the samples {low} to {high - 1} of {size} gives it (budget used up)"

    def _has_budget(self) -> bool:
        return self._runs + 2 <= RUNS_MAX and time.monotonic() < self._until_s

    def _spoils(self, call: partial[Any], low: int, high: int, size: int) -> bool:
        self._runs += 1
        args = [cut_rows(value, low, high, size) for value in call.args]
        kwargs = {name: cut_rows(value, low, high, size) for name, value in call.keywords.items()}
        return not self._is_finite(partial(call.func, *args, **kwargs))


def batch_size(call: Callable[[], Any]) -> int:
    """Return the common first dimension of the tensors among a call's arguments; 0 if there is
    none."""
    if not isinstance(call, partial):
        return 0
    return common_size((*call.args, *call.keywords.values()))
