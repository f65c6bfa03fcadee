"""Order of one epoch: repeatable index lists of a sampler, as tickets for loader processes.

A sampler draws from the same generators and at the same times as under a plain DataLoader: when
its iteration begins, and with each index list, which loader processes prefetch.

Under torchrun, loader and model draw alternately from the same generators; Outlast preserves this.
An IteratorReplay records a generator's state only if other code has advanced the generator since
the iterator's last draw. A generator that no other code advances costs one state, independent of
the iterator's length. Otherwise the number of draws in between is recorded (draw_counts.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlast import random_state
from outlast.data.counted_source import BatchTicket, Codec
from outlast.data.draw_counts import CountedStates, DrawCount, advanced
from outlast.data.loader_state import LoaderState
from outlast.errors import UsageError

_WHOLE_MAX = 32  # states stored whole per epoch
_RUNS_MAX = 100_000
_PROCESS = "process/"
_NAMED = "the process's "


_NO_RUN: tuple[int, int, dict[str, Any]] = (1 << 62, 0, {})


class IteratorReplay:
    """Generator states before an iterator's draws, by draw number.

    `owned`: generators to record in addition to those of the process.
    """

    def __init__(self, owned: Mapping[str, random_state.Generator]) -> None:
        self._owned = owned
        self.draws = 0
        self._recorded = CountedStates()
        self._reached: dict[str, Any] = random_state.states(owned)  # states after a replay
        self._whole = 0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Record one draw of the iterator, made inside the context."""
        before = self._all()
        try:
            yield
        finally:
            self._note(before, self._all())
            self.draws += 1

    def _all(self) -> dict[str, Any]:
        states = random_state.states(self._owned)
        return states | {_PROCESS + name: s for name, s in random_state.snapshot().items()}

    def _note(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        moved = {
            name: state
            for name, state in before.items()
            if not random_state.same(state, after.get(name))
        }
        found = {
            name: state
            for name, state in moved.items()
            if not random_state.same(state, self._reached.get(name))
        }
        if found:
            self._whole += self._recorded.add(self.draws, found, self._reached)
        self._reached |= {name: after[name] for name in moved}
        if self._whole > _WHOLE_MAX or len(self._recorded.runs) > _RUNS_MAX:
            names = ", ".join(sorted(found)).replace(_PROCESS, _NAMED)
            raise UsageError(
                "the loader and the rest of the script draw from the same generators in turn, and"
                f" the draws between cannot be counted for a replacement worker ({names});"
                " draw in the loader from a generator of its own (self.rng = random.Random(seed),"
                " or torch.Generator), or set num_workers > 0"
            )

    def leads_to(self, name: str, state: Any) -> bool:
        """Return whether a replay leaves an owned generator in this state."""
        return name in self._reached and random_state.same(self._reached[name], state)

    def saved(self) -> dict[str, Any]:
        """Return the recorded states as plain data."""
        recorded = self._recorded
        runs = [list(run) for run in recorded.runs]
        return {"draws": self.draws, "found": list(recorded.whole), "runs": runs}

    def follow(self, saved: Mapping[str, Any], draw: Callable[[], None]) -> None:
        """Call `draw` once per recorded draw, each time from the recorded states.

        The process's generators are restored afterwards.
        """
        found = dict(saved["found"])
        runs = iter(saved.get("runs", ()))
        first, times, counts = next(runs, _NO_RUN)
        with random_state.preserved():
            for number in range(saved["draws"]):
                if number == first + times:
                    first, times, counts = next(runs, _NO_RUN)
                counted = {
                    name: advanced(self._reached[name], DrawCount(*count))
                    for name, count in (counts.items() if number >= first else ())
                }
                self._place({**found.get(number, {}), **counted})
                with self.drawing():
                    draw()

    def _place(self, states: Mapping[str, Any]) -> None:
        process = len(_PROCESS)
        random_state.restore({n[process:]: s for n, s in states.items() if n.startswith(_PROCESS)})
        random_state.restore_state(self._owned, states)


_PREFETCHED_MAX = 1 << 16  # lists that loader processes have ahead
_SIZES = ("sampler/batch_size", "sampler/drop_last")  # of torch's BatchSampler
# Index lists are digested; objects of other types count by their type alone.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda value: type(value).__name__)
# Samplers that draw from the process's generators at their first list only.
_DRAWS_ONCE = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


def _digest_of(fetched: Any) -> bytes:
    try:
        return xxhash.xxh3_64_digest(_ENCODER.encode(fetched))
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError):
        return b""  # not compared with others


class EpochOrder(Iterator[Any]):
    """Index lists of one sampler, with the state needed to repeat them."""

    def __init__(self, sampler: Any, generator: torch.Generator | None, dataset: Any) -> None:
        self._sampler = sampler
        self._kept = LoaderState(
            {"sampler": sampler, "generator": generator}, apart=dataset, modules=False
        )
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._draws_once = type(inner) in _DRAWS_ONCE
        self.begin()

    def begin(self) -> None:
        """Begin a new epoch, without opening its iteration."""
        self._start = self._kept.changes()
        self._owned = self._kept.generators()
        self._trail = IteratorReplay(self._owned)
        self._opens = 0
        self._lists: Iterator[Any] = iter(())
        self._recent: deque[bytes] = deque(maxlen=_PREFETCHED_MAX)  # digests of lists
        self.fetched = 0
        self.ended = False

    def open(self) -> None:
        """Open the sampler's iteration; later calls reopen it, as loaders with processes do."""
        self._opens += 1
        with self._trail.drawing():
            self._lists = iter(self._sampler)

    def __next__(self) -> Any:
        """Return the next index list; an exhausted sampler is not iterated again."""
        if self.ended:
            raise StopIteration
        try:
            if self.fetched and self._draws_once and not self._owned:
                fetched = next(self._lists)
            else:
                with self._trail.drawing():
                    fetched = next(self._lists)
        except StopIteration:
            self.ended = True
            raise
        self._count(fetched)
        return fetched

    def _count(self, fetched: Any) -> None:
        self.fetched += 1
        self._recent.append(_digest_of(fetched))

    def place(self, done: int) -> dict[str, Any]:
        """Return the position of the order, as plain data. `done`: lists whose batch was given."""
        now = self._kept.changes().items()
        return {
            "start": self._start,
            "now": {path: value for path, value in now if not self._trail.leads_to(path, value[1])},
            "trail": self._trail.saved(),
            "opens": self._opens,
            "fetched": self.fetched,
            "ahead": [*self._recent][len(self._recent) - (self.fetched - done) :],
            "ended": self.ended,
        }

    def go(self, place: Mapping[str, Any], done: int) -> list[Any]:
        """Go to `place`; return the fetched lists after the first `done`.

        Raises UsageError if the sampler yields fewer lists, or others.
        """
        self._kept.put(place["start"])
        self.begin()
        ahead: list[Any] = []

        def draw() -> None:
            if self._opens < place["opens"]:
                self._opens += 1
                self._lists = iter(self._sampler)
                return
            fetched = next(self._lists, self)
            if fetched is self:
                self.ended = True
                return
            self._count(fetched)
            if self.fetched > done:
                ahead.append(fetched)

        self._trail.follow(place["trail"], draw)
        while self.fetched < place["fetched"] and not self.ended:  # unrecorded lists
            draw()
        if self.fetched < place["fetched"]:
            raise UsageError(
                f"the sampler now gives {self.fetched} batches where the run had taken"
                f" {place['fetched']}: continue with the same data and batch size, or start a new"
                " run directory"
            )
        self._must_be_repeated(place, [*map(_digest_of, ahead)])
        self.ended = place["ended"]
        self._kept.put({**self._kept.changes(), **place["now"]})
        return ahead

    def _must_be_repeated(self, place: Mapping[str, Any], ahead: list[bytes]) -> None:
        """Raise UsageError if lists that were fetched before a change of the sampler differ now, or
        if its iteration was left elsewhere."""
        start, now = place["start"], place["now"]
        resized = any(start.get(path) != now[path] for path in _SIZES if path in now)
        if resized or place.get("ahead", ahead) != ahead:
            raise UsageError(
                f"{type(self._sampler).__name__} gives other batches than the run has taken in this"
                " epoch: its data or settings differ, or were changed in the middle of the epoch,"
                " which a replacement worker cannot repeat; change them between two"
                " epochs, or without loader processes, which fetch index lists ahead"
            )


class TicketSampler(Sampler[BatchTicket]):
    """Sampler of the internal DataLoader: tickets for the lists of `order`, and the base seed."""

    def __init__(self, order: EpochOrder, loader: DataLoader[Any], codec: Codec) -> None:
        self._order, self._codec = order, codec
        self._generator = loader.generator
        self._processes = max(loader.num_workers, 1)
        self.seeds = torch.Generator()  # source of the internal DataLoader's base seed
        self.base = torch.empty(0, device="cpu")  # state of `seeds` before that draw
        self.limit: int | None = None
        self._draws_seed = self._opens = False
        self._ahead: deque[Any] = deque()
        self._blanks = self._fetched = self._given = 0
        self._states: dict[int, dict[str, Any]] = {}

    def begin(self, *, draws_seed: bool) -> None:
        """Make the next iteration open a new epoch.

        `draws_seed`: the user's loader would draw a base seed for its processes.
        """
        self._draws_seed, self._opens = draws_seed, True
        self._blanks = self._fetched = self._given = 0
        self._ahead.clear()
        if draws_seed:  # new processes
            self._states.clear()

    def go(self, done: int, ahead: list[Any], states: dict[int, dict[str, Any]]) -> int:
        """Make the next iteration continue after `done` lists.

        `ahead`: lists already fetched; `states`: states for the new loader processes. Return the
        number of blank batches before the first list.
        """
        self._draws_seed = self._opens = False
        self._ahead = deque(ahead)
        self._blanks = done % self._processes
        self._fetched, self._given = done, 0
        self._states = dict(states)
        return self._blanks

    def __iter__(self) -> Iterator[BatchTicket]:
        if self._opens:
            self._order.open()
        if self._draws_seed:
            own = self._generator
            self.base = torch.get_rng_state() if own is None else own.get_state()
            draw_seed(own)  # the internal DataLoader then draws it from `seeds`
            self.seeds.set_state(self.base)
            self._draws_seed = False
        return self

    def __next__(self) -> BatchTicket:
        process = self._given % self._processes
        if self._blanks:
            self._blanks -= 1
            self._given += 1
            return BatchTicket(None, is_blank=True)
        if self.limit is not None and self._fetched >= self.limit:
            raise StopIteration
        indices = self._ahead.popleft() if self._ahead else next(self._order)
        self._fetched += 1
        self._given += 1
        state = self._states.pop(process, None)
        return BatchTicket(indices, self._codec.encode(state) if state else b"")


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a base seed as a DataLoader does."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
