"""DataLoaders with persistent workers, read beside the loop's own loader.

With persistent_workers=True a loader draws the seed of its processes once, when it is first read,
and its processes go on from read to read. A redo would move them twice, and a successor would draw
a seed that the others do not draw.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable

from torch.utils.data import DataLoader

from outlast.data.epoch_order import TicketSampler


class LastingLoaders:
    """Finds such loaders by the processes that appear in phases and between them."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self._refuse = refuse
        self._processes: set[int | None] | None = None
        self._known: set[int] = set()  # ids of loaders that the loop itself reads

    def accept(self) -> None:
        """The loaders that are being read now belong to the loop."""
        self._processes = _children()
        self._known = {id(loader) for loader in _lasting()}

    def check(self, where: str) -> None:
        """Refuse a loader that has started processes since the last look and kept them."""
        now = _children()
        if self._processes is None or now <= self._processes:
            self._processes = now
            return
        self._processes = now
        for loader in _lasting():
            if id(loader) not in self._known:
                self._known.add(id(loader))
                self._refuse(
                    f"{where} read a DataLoader of {type(loader.dataset).__name__} with"
                    " persistent_workers=True, whose processes go on from one read to the next",
                    "leave persistent_workers at False for loaders other than the one given to"
                    " session.batches()",
                )


def _children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def _lasting() -> list[DataLoader[object]]:
    """The DataLoaders of the script whose processes stay, and have been started."""
    found: list[DataLoader[object]] = [
        thing for thing in gc.get_objects() if issubclass(type(thing), DataLoader)
    ]
    return [
        loader
        for loader in found
        if getattr(loader, "persistent_workers", False)
        and getattr(loader, "_iterator", None) is not None
        and not isinstance(loader.sampler, TicketSampler)  # the source's own
    ]
