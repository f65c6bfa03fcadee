"""Histories of simulated ranks: their own state, and the batches that they have trained.

A rank's own state is a chain of numbers: after phase n, and again after the script's code behind
it. While a rank is absent its chain stands still. When it comes back, the chain goes on from the
newest number that it has left, in another phase than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, NoReturn

from outlast.controller import inputs
from outlast.controller.recovery.shrinking import left_prefix, parted_slots
from outlast.transport import messages

_PRIME = 1_000_003
_MASK = (1 << 61) - 1


def mix(*parts: int) -> int:
    """Return a hash of the parts (61 bits)."""
    value = 7
    for part in parts:
        value = (value * _PRIME ^ part) & _MASK
    return value


def own_step(own: int, n: int) -> int:
    """Return a rank's own state after phase n, before the script continues."""
    return mix(own, n, 2)


def own_tail(own: int, n: int) -> int:
    """Return a rank's own state when the script has run on to the next phase."""
    return mix(own, n, 3)


def own_of(slot: bytes) -> int:
    """Return a rank's own state in a slot, whose place in the data follows it."""
    return int(slot.partition(b" ")[0])


def data_of(slot: bytes) -> bytes:
    """Return the place in the data of a slot; b"" without one."""
    return slot.partition(b" ")[2]


def newest_own(slots: Mapping[str, bytes]) -> int | None:
    """Return the own state in the newest of a rank's slots, None if it has left none. `slots`:
    without a prefix."""
    kinds = ("after", "before")
    found = [
        (int(n), kinds.index(kind), slot)
        for key, slot in slots.items()
        if slot
        for kind, _, n in [key.partition(":")]
        if kind in kinds
    ]
    return own_of(max(found)[2]) if found else None


def merge_slots(slots: Mapping[str, bytes], n: int, rank: int) -> dict[str, bytes]:
    """Return the slots with which a rank takes its place before phase n+1 (returned_rank.py)."""
    parted, others = parted_slots(slots, n)
    if not parted:
        return others
    own = newest_own(parted)
    merged: dict[str, bytes] = {}
    for key, slot in others.items():
        fresh = mix(own_of(slot), rank, 5) if own is None else own
        data = data_of(slot)
        merged[key] = slot if key.startswith("result:") else b"%d %b" % (fresh, data)
    return merged


def generation_of(checkpoint: messages.Checkpointed) -> int:
    """Return the generation that wrote a simulated checkpoint: 5 of `memory n6 g5`."""
    return int(checkpoint.path.rpartition(" g")[2])


class TrainedShare(NamedTuple):
    """Share of one rank in a committed phase."""

    own: int  # its own state before the phase
    kind: str  # epoch or step
    epoch: int
    number: int | None  # of its batch; None without one
    deal: bytes  # as all ranks must have it
    rows: int


class RankHistories:
    """Own state of each rank by phase, and the shares of all committed phases."""

    def __init__(self, world: int, fail: Callable[[str], NoReturn]) -> None:
        self._world, self._fail = world, fail
        self._chains: dict[int, list[tuple[int, list[int]]]] = {
            seat: [(0, [own_tail(mix(0, seat), 0)])] for seat in range(world)
        }
        self._known: dict[int, set[int]] = {seat: set() for seat in range(world)}
        self._shares: dict[int, dict[int, TrainedShare]] = {}  # by phase and rank
        # The same for each generation: a start goes on from the one that wrote its checkpoint.
        self._by_generation: dict[int, dict[int, dict[int, TrainedShare]]] = {}
        self.absent: dict[int, frozenset[int]] = {}  # by generation
        # Slots that absent ranks have left, by generation: one may save while the next is decided.
        self._kept: dict[int, dict[int, dict[str, bytes]]] = {0: {}}
        self.returns = 0  # ranks that have come back between two steps
        self.restores = 0  # ranks that have come back by a restart from a checkpoint without them

    def own(self, seat: int, n: int) -> int:
        """Return the rank's own state before phase n+1."""
        base, chain = [one for one in self._chains[seat] if one[0] <= n][-1]
        while len(chain) <= n - base:
            at = base + len(chain)
            chain.append(own_tail(own_step(chain[-1], at), at))
        return chain[n - base]

    def come_back(self, seat: int, n: int, own: int) -> None:
        """Let a rank's own state go on from `own` before phase n+1."""
        self.returns += 1
        kept = [one for one in self._chains[seat] if one[0] < n]
        self._chains[seat] = [*kept, (n, [own])]

    def part_of(
        self, rank: int, generation: int, unit: Iterable[int], last: int | None, other: int
    ) -> int:
        """Return the own state of an absent rank of a unit for a checkpoint of a generation.
        `last`: the newest that it has left, as its deputy has it; `other`: of the rank at whose
        place it comes back."""
        kept = self._kept[generation]
        kinds = (":before:", ":after:")
        keys = ({key for key in kept[each] if "result:" not in key} for each in unit)
        has_left = any(kind in f":{key}" for key in set.intersection(*keys) for kind in kinds)
        if last not in self._known[rank] if last is not None else has_left:
            self._fail(f"the deputy of rank {rank} saves own state that is not its own")
        return mix(other, rank, 5) if last is None else last

    def begin_from_part(self, seat: int, n: int, own: int) -> None:
        """Let a rank begin before phase n+1 from the part that its deputy has saved."""
        self.come_back(seat, n, own)
        self.returns -= 1
        self.restores += 1

    def decide(
        self, entry: inputs.DecisionMade, checkpoint: messages.Checkpointed | None = None
    ) -> None:
        """Record a decision: phases behind its place count no more. A start goes on from the
        history of `checkpoint`, which may have been taken back before."""
        absent = self.absent[entry.generation] = frozenset(entry.absent)
        if any(entry.seats[seat] for seat in absent) or absent & {*entry.joining}:
            self._fail(f"ranks {sorted(absent)} are absent and have workers: {entry}")
        if len(absent) == self._world:
            self._fail(f"no rank is left in generation {entry.generation}")
        history = self._shares
        if entry.verdict == "start" and checkpoint is not None:
            history = self._by_generation[generation_of(checkpoint)]
        self._shares = {n: one for n, one in history.items() if n <= entry.n}
        self._by_generation[entry.generation] = self._shares
        kept = self._kept[max(self._kept)]
        for seat in absent & kept.keys():
            if entry.slots.get(seat, {}) != kept[seat]:
                self._fail(f"what rank {seat} has left was not kept: {entry}")
        self._kept[entry.generation] = {seat: entry.slots.get(seat, {}) for seat in absent}
        if entry.verdict == "start":
            for seat, chains in self._chains.items():
                self._chains[seat] = [one for one in chains if one[0] <= entry.n]

    def present(self, generation: int) -> set[int]:
        """Return the ranks that are present in a generation."""
        return set(range(self._world)).difference(self.absent.get(generation, ()))

    def check_return(self, body: messages.Seat) -> None:
        """Check the slots for a rank that comes back: a place of another rank, and what this rank
        itself has left."""
        prefix = left_prefix(body.n)
        for key, slot in body.slots.items():
            if not key.startswith("left:"):
                self._check_place(key, slot, body)
            elif not key.startswith(prefix):
                self._fail(f"rank {body.seat} received {key} before phase {body.n + 1}")
            elif (
                slot
                and key != prefix
                and "result:" not in key
                and own_of(slot) not in self._known[body.seat]
            ):
                self._fail(f"rank {body.seat} received {key}, which is not its own")

    def _check_place(self, key: str, slot: bytes, body: messages.Seat) -> None:
        if key.startswith("result:"):
            return
        own, owns = own_of(slot), set[int]()
        for seat in range(self._world):
            before = self.own(seat, body.n)
            owns.add(before)
            known = self._known[seat]
            owns.update(each for each in known if own_tail(each, body.n) == before)
        if own not in owns and own not in self._known[body.seat]:
            self._fail(f"rank {body.seat} received {key}, which is of no rank's place")

    def write(self, seat: int, own: int) -> None:
        """Record own state that a rank has written into a slot."""
        self._known[seat].add(own)

    def agree(self, n: int, present: Collection[int], shares: Mapping[int, TrainedShare]) -> None:
        """Check the shares of the ranks that have agreed on phase n."""
        if shares.keys() != set(present):
            self._fail(f"ranks {sorted(shares)} have agreed on phase {n}, and {present} are there")
        if len({(one.kind, one.epoch, one.deal) for one in shares.values()}) > 1:
            self._fail(f"ranks have agreed on phase {n} with other places in the data: {shares}")
        numbers = [one.number for one in shares.values() if one.number is not None]
        if len(set(numbers)) != len(numbers):
            self._fail(f"two ranks train one batch in phase {n}: {shares}")
        if not numbers and any(one.rows and one.kind == "step" for one in shares.values()):
            self._fail(f"no rank trains a batch in phase {n}: {shares}")

    def apply(self, n: int, shares: Mapping[int, TrainedShare]) -> None:
        """Record the shares of a phase that a rank applies."""
        if self._shares.setdefault(n, dict(shares)) != shares:
            self._fail(f"phase {n} was committed as {self._shares[n]} and as {shares}")

    def check(self) -> None:
        """Check that each batch was trained once, and no rank has drawn random numbers twice."""
        drawn: dict[tuple[int, int], int] = {}
        numbers: dict[int, list[int]] = {}
        rows = 0
        for n, shares in sorted(self._shares.items()):
            for seat, share in shares.items():
                if (before := drawn.setdefault((seat, share.own), n)) != n:
                    self._fail(f"rank {seat} has equal random numbers in phases {before} and {n}")
                if share.number is not None:
                    numbers.setdefault(share.epoch, []).append(share.number)
                rows = share.rows
        for epoch, trained in numbers.items():
            self._check_epoch(trained, rows, is_over=epoch < max(numbers))

    def _check_epoch(self, trained: Iterable[int], rows: int, *, is_over: bool) -> None:
        counts = Counter(trained)
        whole = range(self._world * rows)
        twice = sorted(number for number, count in counts.items() if count > 1)
        strange = sorted(counts.keys() - set(whole))
        missing = sorted(set(whole) - counts.keys()) if is_over else []
        if twice or strange or missing:
            self._fail(
                f"batches of an epoch: {twice} trained more than once, {missing} never, and"
                f" {strange} are of no rank"
            )
