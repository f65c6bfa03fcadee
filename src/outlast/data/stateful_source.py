"""Loaders that give their position by state_dict and load_state_dict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from outlast import random_state
from outlast.data.counted_source import Codec, CountedSource, set_epoch
from outlast.data.loader_state import LoaderState
from outlast.data.stream_positions import is_torchdata, with_positions


class StatefulSource(CountedSource):
    """An iterable with `state_dict` and `load_state_dict`: torchdata's, or any other.

    Within one process the loader just runs on. A state is loaded only where a position is restored,
    or an epoch was cut in its middle.
    """

    kind = "loader with a state_dict"

    def __init__(self, loader: Any, codec: Codec) -> None:
        super().__init__()
        self._restarts = is_torchdata(loader)
        self._parts = (loader, *_parts(loader))
        self._loader: Any = with_positions(loader, codec) if self._restarts else loader
        self._persists = self._restarts and loader.persistent_workers and loader.num_workers > 0
        roots = {"loader": loader} if not self._restarts else {"dataset": loader.dataset}
        self._kept = LoaderState(roots, attributes=False)
        self._batches: Iterator[Any] | None = None
        self._saved_state: Any = None  # of the loader, where the last epoch ended; None: untouched
        self._cut = False  # that was in the middle, by the loader's count
        self._is_elsewhere = False  # the loader of this process is not there yet

    @property
    def length(self) -> int | None:
        """Return the loader's declared length; None for streams."""
        return declared_length(self._loader)

    def close(self) -> None:
        """Stop loader workers and drop the loader."""
        super().close()
        self._batches = None
        self._loader = None

    def start_epoch(self, epoch: int, length: int | None) -> None:
        """See CountedSource.start_epoch; also calls `set_epoch` of loader, dataset and sampler."""
        super().start_epoch(epoch, length)
        self._set_epoch()

    def _set_epoch(self) -> None:
        set_epoch(self.epoch, *self._parts)

    def _begin(self) -> None:
        if not (self._is_elsewhere or self._cut):
            self._batches = iter(self._loader)
            return
        self._is_elsewhere = False
        kept = self._kept.changes()
        with random_state.preserved():
            self._loader.load_state_dict(self._saved_state)
            if self._restarts or self._cut:
                self._batches = iter(self._loader)  # where the last epoch ended: it is over
            self._kept.put(kept)
        if not self._persists or self._cut:
            self._batches = iter(self._loader)

    def _take(self) -> Any:
        assert self._batches is not None, "an epoch begins before it gives batches"
        try:
            return next(self._batches)
        except StopIteration:
            if self._done or self._saved_state is None:
                raise
            # The loaded position is the loader's end: restart it.
            self._batches = iter(self._loader)
            return next(self._batches)

    def _mark(self) -> dict[str, Any]:
        state = self._saved_state if self._batches is None else self._loader.state_dict()
        return {"state": state, "cut": self._cut, "kept": self._kept.changes()}

    def _return(self, position: dict[str, Any]) -> None:
        self._batches = None
        self._set_epoch()
        self._saved_state, self._cut = position["state"], position["cut"]
        self._is_elsewhere = self._saved_state is not None
        if self._begun and not position["ended"]:
            self._is_elsewhere = False
            with random_state.preserved():
                self._loader.load_state_dict(self._saved_state)
                self._batches = iter(self._loader)
        self._kept.put(position["kept"])

    def _finish(self, exhausted: bool) -> None:
        if self._batches is None:  # it had ended where the position was taken
            return
        self._cut = False
        if not exhausted:
            with random_state.preserved():
                self._run_out()
        self._saved_state = self._loader.state_dict()
        self._batches = None

    def _run_out(self) -> None:
        """Read the loader to its end.

        A new epoch may begin only there, since most loaders continue where they are when they are
        iterated again.
        """
        assert self._batches is not None, "only an epoch that has begun runs out"
        if self._restarts and self._limit != self.length:
            self._cut = True
            return
        for _ in self._batches:
            pass


def declared_length(loader: Any) -> int | None:
    """Return `len(loader)` where it is exact; None for streams, whose length is an estimate."""
    from torch.utils.data import IterableDataset

    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return None
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def _parts(loader: Any) -> list[Any]:
    names = ("dataset", "sampler", "batch_sampler")
    return [part for name in names if (part := getattr(loader, name, None)) is not None]
