"""An epoch's order as tickets for the loader's processes, fetched when torch would fetch lists."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from outlast.data.codec import Codec
from outlast.data.loader_process import Ticket
from outlast.data.order import Order


class Tickets(Sampler[Ticket]):
    """The sampler of our own DataLoader: the lists of `order`, and the base seed of processes."""

    def __init__(self, order: Order, loader: DataLoader[Any], codec: Codec) -> None:
        self._order, self._codec = order, codec
        self._generator = loader.generator
        self._processes = max(loader.num_workers, 1)
        self.seeds = torch.Generator()  # gives our DataLoader the seed that is drawn here
        self.base = torch.empty(0, device="cpu")  # the state of `seeds` before that
        self.limit: int | None = None
        self._draws_seed = self._opens = False
        self._ahead: deque[Any] = deque()
        self._blanks = self._fetched = self._given = 0
        self._states: dict[int, dict[str, Any]] = {}

    def begin(self, *, draws_seed: bool) -> None:
        """The next iteration opens a new epoch. `draws_seed`: the user's loader would draw the
        base seed of its processes."""
        self._draws_seed, self._opens = draws_seed, True
        self._blanks = self._fetched = self._given = 0
        self._ahead.clear()
        if draws_seed:  # new processes
            self._states.clear()

    def go(self, done: int, ahead: list[Any], states: dict[int, dict[str, Any]]) -> int:
        """The next iteration goes on behind `done` lists, of which `ahead` were fetched already,
        in new processes that are to have `states`. Return the number of blank batches before."""
        self._draws_seed = self._opens = False
        self._ahead = deque(ahead)
        self._blanks = done % self._processes
        self._fetched, self._given = done, 0
        self._states = dict(states)
        return self._blanks

    def __iter__(self) -> Iterator[Ticket]:
        if self._opens:
            self._order.open()
        if self._draws_seed:
            own = self._generator
            self.base = torch.get_rng_state() if own is None else own.get_state()
            draw_seed(own)  # our DataLoader does so next, from `seeds`
            self.seeds.set_state(self.base)
            self._draws_seed = False
        return self

    def __next__(self) -> Ticket:
        process = self._given % self._processes
        if self._blanks:
            self._blanks -= 1
            self._given += 1
            return Ticket(None, is_blank=True)
        if self.limit is not None and self._fetched >= self.limit:
            raise StopIteration
        indices = self._ahead.popleft() if self._ahead else next(self._order)
        self._fetched += 1
        self._given += 1
        state = self._states.pop(process, None)
        return Ticket(indices, self._codec.encode(state) if state else b"")


def draw_seed(generator: torch.Generator | None) -> int:
    """One number, drawn as a DataLoader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
