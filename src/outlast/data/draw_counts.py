"""Draw counts between two states of a random generator: 8 bytes instead of a whole state.

| generator | state | distance found by |
|---|---|---|
| torch on CPU, `random`, `numpy.random` | MT19937: 624 words and a place | search, block by block |
| `numpy.random.default_rng` | PCG64: one number of 128 bits | bitwise, lowest bit first |

Other parts of a state (a cached normal number, a seed) are its *rest*, stored unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from outlast import random_state

SEARCHED_MAX = 1 << 22  # raw draws per search
_WORDS = 624
_MASK = (1 << 128) - 1
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
# ATen's CPUGeneratorImplStateLegacy: seed, left, seeded, next, words, and cached normal draws.
_TORCH_BYTES, _TORCH_WORDS = 5056, slice(24, 24 + 8 * _WORDS)


class DrawCount(NamedTuple):
    """State as the number of raw draws after another state, and its rest."""

    draws: int
    rest: Any


class _Twister(NamedTuple):
    """Parts of an MT19937 state; the functions of `_JOINS` rebuild a state from them."""

    key: np.ndarray[Any, np.dtype[np.uint32]]
    place: int
    rest: Any


def count_between(before: Any, after: Any, guess: int = -1) -> DrawCount | None:
    """Return the number of draws from one state to another, or None if it is unknown.

    `guess` is tried first; a search ends after SEARCHED_MAX draws.
    """
    if _is_pcg(before) and _is_pcg(after):
        return _count_of_pcg(before, after)
    one, other = _split(before), _split(after)
    if one is None or other is None:
        return None
    bits = _bits_of(one)
    if guess >= 0:
        bits.random_raw(guess, output=False)
        if _is_at(bits, other):
            return DrawCount(guess, other.rest)
        bits = _bits_of(one)
    drawn = 0
    while drawn <= SEARCHED_MAX:
        key, place = _key_and_place(bits)
        if np.array_equal(key, other.key) and other.place >= place:
            return DrawCount(drawn + other.place - place, other.rest)
        step = _WORDS - place + 1  # to the first word of the next block
        bits.random_raw(step, output=False)
        drawn += step
    return None


def advanced(state: Any, count: DrawCount) -> Any:
    """Return `state` advanced by `count`."""
    if _is_pcg(state):
        bits = np.random.PCG64()
        bits.state = state
        bits.advance(count.draws)
        return {**count.rest, "state": bits.state["state"]}
    one = _split(state)
    assert one is not None, "only states whose draws can be counted are advanced"
    bits = _bits_of(one)
    bits.random_raw(count.draws, output=False)
    return _JOINS[type(state)](*_key_and_place(bits), count.rest)


def _count_of_pcg(before: dict[str, Any], after: dict[str, Any]) -> DrawCount | None:
    plus, multiplier = before["state"]["inc"], _PCG_MULTIPLIER
    if after["state"]["inc"] != plus:
        return None
    now, goal, draws, bit = before["state"]["state"], after["state"]["state"], 0, 1
    while now != goal:
        if (now ^ goal) & bit:
            now, draws = (now * multiplier + plus) & _MASK, draws | bit
        plus, multiplier = (multiplier + 1) * plus & _MASK, multiplier * multiplier & _MASK
        bit <<= 1
    return DrawCount(draws, {name: value for name, value in after.items() if name != "state"})


def _is_pcg(state: Any) -> bool:
    return isinstance(state, dict) and state.get("bit_generator") == "PCG64"


def _split(state: Any) -> _Twister | None:
    if isinstance(state, torch.Tensor) and state.numel() == _TORCH_BYTES:
        data = state.numpy().tobytes()
        until_next, _, place = struct.unpack_from("<iiQ", data, 8)
        words = np.frombuffer(data[_TORCH_WORDS], np.uint64).astype(np.uint32)
        rest = [data[:8], data[_TORCH_WORDS.stop :]]
        return _Twister(words, _WORDS if until_next == 1 else place, rest)
    if isinstance(state, tuple) and len(state) == 3:
        *words, place = state[1]
        return _Twister(np.array(words, np.uint32), place, [state[0], state[2]])
    if isinstance(state, dict) and state.get("bit_generator") == "MT19937":
        inner = state["state"]
        rest = {name: value for name, value in state.items() if name != "state"}
        return _Twister(inner["key"], inner["pos"], rest)
    return None


def _join_torch(key: np.ndarray[Any, Any], place: int, rest: Any) -> torch.Tensor:
    head = rest[0] + struct.pack("<iiQ", _WORDS + 1 - place, 1, place)
    data = head + key.astype(np.uint64).tobytes() + rest[1]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _join_python(key: np.ndarray[Any, Any], place: int, rest: Any) -> tuple[Any, ...]:
    return rest[0], (*key.tolist(), place), rest[1]


def _join_numpy(key: np.ndarray[Any, Any], place: int, rest: Any) -> dict[str, Any]:
    return {**rest, "state": {"key": key, "pos": place}}


_JOINS: dict[type, Callable[[np.ndarray[Any, Any], int, Any], Any]] = {
    torch.Tensor: _join_torch,
    tuple: _join_python,
    dict: _join_numpy,
}


def _bits_of(one: _Twister) -> np.random.MT19937:
    bits = np.random.MT19937()
    bits.state = {"bit_generator": "MT19937", "state": {"key": one.key, "pos": one.place}}
    return bits


def _key_and_place(bits: np.random.MT19937) -> tuple[np.ndarray[Any, Any], int]:
    state: Any = bits.state["state"]
    return state["key"], state["pos"]


def _is_at(bits: np.random.MT19937, other: _Twister) -> bool:
    key, place = _key_and_place(bits)
    return place == other.place and np.array_equal(key, other.key)


class CountedStates:
    """Generator states by draw number, as draw counts relative to the last reached state.

    Consecutive draws with equal counts are stored as one run, so that a model with a constant
    number of draws per step needs constant space.
    """

    def __init__(self) -> None:
        self.whole: list[tuple[int, dict[str, Any]]] = []
        self.runs: list[list[Any]] = []  # [first draw, number of draws, counts by generator]
        self._guesses: dict[str, int] = {}
        self._failures: dict[str, int] = {}

    def add(self, draw: int, found: dict[str, Any], reached: dict[str, Any]) -> int:
        """Record the states `found` at a draw; return the number of states stored whole."""
        counts: dict[str, list[Any]] = {}
        whole: dict[str, Any] = {}
        for name, state in found.items():
            count = self._count(name, reached.get(name), state)
            if count is None:
                whole[name] = state
            else:
                counts[name] = list(count)
        if whole:
            self.whole.append((draw, whole))
        last = self.runs[-1] if self.runs else None
        if counts and last and last[0] + last[1] == draw and random_state.same(last[2], counts):
            last[1] += 1
        elif counts:
            self.runs.append([draw, 1, counts])
        return len(whole)

    def _count(self, name: str, reached: Any, state: Any) -> DrawCount | None:
        if reached is None or self._failures.get(name, 0) >= _FAILURES_MAX:
            return None
        count = count_between(reached, state, self._guesses.get(name, -1))
        if count is None:
            self._failures[name] = self._failures.get(name, 0) + 1
        else:
            self._guesses[name] = count.draws
        return count


_FAILURES_MAX = 8  # failed searches for a generator; then its states are stored whole
