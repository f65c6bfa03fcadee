"""Windows of the state that votes compare: replicas digest the same bytes at the same vote.

    kind         leaves                                     windows
    parameters   all                                        at most `every`, one a vote in turn, so
    optimizers   all tensors of the parameters' states      that `every` votes compare all bytes
    gradients    all at the vote, hence after reduction     as many as the budget needs, in turn

A window costs about its budget. More than `every` windows of parameters and optimizers would be
needed for large states; these are divided into `every` larger ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import xxhash

from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.state.tensor_digests import Word, local_shard, values_of, word_of

PARAMETERS, OPTIMIZERS, GRADIENTS = "parameters", "optimizers", "gradients"
STATE_NS = 100_000  # budget of a window of parameters and optimizers
GRADIENTS_NS = 150_000
# What a digest costs, roughly: equal constants on all ranks, so that all divide alike.
_CALL_NS = {"cpu": 1_500}
_DEVICE_CALL_NS = 40_000
_BYTES_A_NS = {"cpu": 10}
_DEVICE_BYTES_A_NS = 300
_ABSENT = b""  # no gradient, or a sparse one


class _Leaf(NamedTuple):
    """A tensor of the state, found anew at each vote."""

    kind: str
    name: str
    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer | None = None
    key: str = ""

    def tensor(self) -> torch.Tensor | None:
        """Return the memory that this rank holds; None without a dense tensor."""
        value = self.parameter.grad if self.kind == GRADIENTS else self.parameter
        if self.optimizer is not None:
            value = (self.optimizer.state.get(self.parameter) or {}).get(self.key)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        return local_shard(value)


class ComparedPiece(NamedTuple):
    """The elements from `start` to `end` of a leaf."""

    leaf: _Leaf
    start: int
    end: int


class WindowDigests(NamedTuple):
    """Digests of one window: `number` of `windows` of the state, and of the gradients."""

    number: int
    windows: int
    gradient_number: int  # -1: gradients are left out
    gradient_windows: int
    pieces: Sequence[ComparedPiece]
    values: Sequence[bytes]

    @property
    def digest(self) -> int:
        """Return one digest of all."""
        return xxhash.xxh3_64_intdigest(b"".join(self.values))

    def names(self) -> dict[str, dict[str, bytes]]:
        """Return the digests by kind and name."""
        found: dict[str, dict[str, bytes]] = {}
        for (leaf, _, _), value in zip(self.pieces, self.values, strict=True):
            found.setdefault(leaf.kind, {})[leaf.name] = value
        return found


class ComparedWindows:
    """Division of one rank's state into windows. `every`: votes within which all are compared."""

    def __init__(self, protected: ProtectedState, every: int) -> None:
        self._protected, self._every = protected, max(1, every)
        self._keys = -1
        self._state: list[list[ComparedPiece]] = [[]]
        self._gradients: list[list[ComparedPiece]] = [[]]

    @torch.no_grad()
    def take(self, step: int, without: Collection[str] = ()) -> WindowDigests:
        """Digest the windows whose turn it is, without the kinds `without`."""
        if step % len(self._state) == 0 and (keys := self._count_keys()) != self._keys:
            self._keys = keys
            self._divide()
        number, gradient_number = step % len(self._state), step % len(self._gradients)
        pieces = [p for p in self._state[number] if p.leaf.kind not in without]
        if GRADIENTS in without:
            gradient_number = -1
        else:
            pieces += self._gradients[gradient_number]
        counts = len(self._state), len(self._gradients)
        values = values_of([_word(piece) for piece in pieces])
        return WindowDigests(number, counts[0], gradient_number, counts[1], pieces, values)

    def _count_keys(self) -> int:
        """Return the number of states' entries: a first step of a parameter adds some."""
        return sum(
            len(values)
            for optimizer in self._protected.optimizers.values()
            for values in optimizer.state.values()
            if isinstance(values, dict)
        )

    def _divide(self) -> None:
        state = list(self._leaves())
        needed = -(-sum(map(_cost_ns, state)) // STATE_NS)
        self._state = _cut(state, min(self._every, max(1, needed)))
        gradients = [
            _Leaf(GRADIENTS, f"{name}.grad", parameter)
            for name, parameter in self._protected.audited
            if parameter.requires_grad
        ]
        needed = -(-sum(map(_cost_ns, gradients)) // GRADIENTS_NS)
        self._gradients = _cut(gradients, max(1, needed))

    def _leaves(self) -> Iterator[_Leaf]:
        optimizers = sorted(self._protected.optimizers.items())
        for name, parameter in self._protected.audited:
            yield _Leaf(PARAMETERS, name, parameter)
            for owner, optimizer in optimizers:
                values = optimizer.state.get(parameter) or {}
                for key in sorted(k for k, v in values.items() if isinstance(v, torch.Tensor)):
                    full_name = f"{owner}.state.{name}.{key}"
                    yield _Leaf(OPTIMIZERS, full_name, parameter, optimizer, key)


def _size(leaf: _Leaf) -> torch.Tensor:
    """Return a tensor of the leaf's size, also where it has no gradient yet."""
    tensor = leaf.tensor()
    return local_shard(leaf.parameter) if tensor is None else tensor


def _cost_ns(leaf: _Leaf) -> int:
    tensor = _size(leaf)
    kind = tensor.device.type
    bytes_a_ns = _BYTES_A_NS.get(kind, _DEVICE_BYTES_A_NS)
    return _CALL_NS.get(kind, _DEVICE_CALL_NS) + tensor.nbytes // bytes_a_ns


def _cut(leaves: Sequence[_Leaf], count: int) -> list[list[ComparedPiece]]:
    """Divide leaves into `count` windows of equal cost; an element at an edge belongs to both."""
    windows: list[list[ComparedPiece]] = [[] for _ in range(count)]
    costs = [_cost_ns(leaf) for leaf in leaves]
    total, at = sum(costs), 0
    for leaf, cost in zip(leaves, costs, strict=True):
        size = _size(leaf).numel()
        first = at * count // total
        for number in range(first, count):
            begin = max(total * number // count - at, 0)
            end = min(total * (number + 1) // count - at, cost)
            if begin < end:
                windows[number].append(
                    ComparedPiece(leaf, begin * size // cost, -(-end * size // cost))
                )
            elif end < begin and number > first:
                break
        at += cost
    return windows


def _word(piece: ComparedPiece) -> Word:
    tensor = piece.leaf.tensor()
    if tensor is None:
        return _ABSENT
    is_whole = piece.start == 0 and piece.end >= tensor.numel()
    return word_of(tensor) if is_whole else word_of(tensor, piece.start, piece.end)
