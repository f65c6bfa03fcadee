"""Decoding of many equal-shaped records at once.

Nearly all records of a long run are PhaseDone and Metrics events. A worker writes thousands of them
that differ in the bytes of a few numbers only. A `RecordLayout` is learned from one record: which
bytes are constant, and where the numbers are. Records whose constant bytes are equal have the same
MessagePack structure, so that NumPy extracts their numbers without decoding one by one. All other
records are left to the decoder of events.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from outlast.events import Metrics, PhaseDone, decoder

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
WORD = 8
LAYOUTS_MAX = 24  # new layouts of one length in a block; further records are decoded one by one
ROWS_MIN = 32  # fewer records are decoded one by one
TAG_AT, TAG_END = 1, 6  # of the key "type", behind the map's first byte
TAG = b"\xa4type"
TAGS: dict[str, type[PhaseDone | Metrics]] = {"PhaseDone": PhaseDone, "Metrics": Metrics}
LOSS = "values.loss"
_FIELDS: dict[str, frozenset[str]] = {
    name: frozenset((*kind.__struct_fields__, "type")) for name, kind in TAGS.items()
}
_OPTIONAL = frozenset(("steps",))
_UNSIGNED = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FLOAT = 0xCB
_INT_MAX = (1 << 63) - 1


class _Value(NamedTuple):
    """A value of a record: its bytes, and its kind."""

    begin: int
    end: int
    kind: Literal["small", "integer", "float", "text"]  # small: the type byte is the integer


class RecordLayout:
    """Structure of records of one type and length. `tag`: PhaseDone or Metrics."""

    def __init__(self, payload: bytes, values: dict[str, _Value]) -> None:
        self.tag = _text(payload, values["type"])
        self.phase_kind = _text(payload, values["kind"]) if "kind" in values else ""
        self._width = -(-len(payload) // WORD) * WORD
        mask = np.zeros(self._width, np.uint8)
        mask[: len(payload)] = 0xFF
        names: list[str] = []
        formats: list[str] = []
        offsets: list[int] = []
        for name, value in values.items():
            if value.kind == "text" and name != "worker":
                continue
            mask[value.begin : value.end] = 0x80 if value.kind == "small" else 0
            size = value.end - value.begin
            code = {"small": "u1", "integer": f">u{size}", "float": ">f8", "text": f"S{size}"}
            names.append(name)
            formats.append(code[value.kind])
            offsets.append(value.begin)
        self._dtype = np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": self._width}
        )
        pattern = np.frombuffer(payload.ljust(self._width, b"\0"), np.uint8) & mask
        self._mask, self._pattern = mask.view(np.uint64), pattern.view(np.uint64)

    def matches(self, rows: Bytes) -> NDArray[np.bool_]:
        """Return which rows (records, filled to whole words) have this structure."""
        words = rows.view(np.uint64)
        return ~((words & self._mask) != self._pattern).any(axis=1)

    def columns(self, rows: Bytes) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """Return the values of rows that match, by name, and which of them are in range.

        Integers above 63 bits, `steps` of 0, and names that end with a zero byte are not.
        """
        table = rows.view(self._dtype)[:, 0]
        right = np.ones(len(rows), np.bool_)
        for name in self._dtype.names or ():
            kind = self._dtype[name]
            if kind.kind == "u" and kind.itemsize == WORD:
                right &= table[name] <= _INT_MAX
            elif kind.kind == "S":
                last = self._dtype.fields[name][1] + kind.itemsize - 1  # type: ignore[index]
                right &= rows[:, last] != 0
        if "steps" in (self._dtype.names or ()):
            right &= table["steps"] > 0
        return table, right


def record_layout(payload: bytes) -> RecordLayout | None:
    """Return the layout of a record; None for one that has to be decoded alone."""
    try:
        decoder.decode(payload)
        values, end = _map_values(payload, 0, "")
    except (msgspec.DecodeError, IndexError, ValueError):
        return None
    tag = values.get("type")
    if tag is None or end != len(payload) or tag.kind != "text":
        return None
    fields = _FIELDS.get(_text(payload, tag), frozenset())
    own = {name.partition(".")[0] for name in values}
    if not fields or own | _OPTIONAL != fields | _OPTIONAL or not _right_kinds(values):
        return None
    return RecordLayout(payload, values)


def _right_kinds(values: dict[str, _Value]) -> bool:
    for name, value in values.items():
        if name in ("type", "worker", "kind"):
            is_right = value.kind == "text" and (name != "worker" or value.end > value.begin)
        elif name.startswith("values."):
            is_right = value.kind == "float"
        else:
            is_right = value.kind in ("small", "integer")
        if not is_right:
            return False
    return True


def _map_values(payload: bytes, at: int, prefix: str) -> tuple[dict[str, _Value], int]:
    """Return the values of a map by key, those of maps inside of it by `key.key`, and its end.

    Raises ValueError for what has no fixed structure, or has a key twice.
    """
    if payload[at] & 0xF0 != 0x80:
        raise ValueError
    count, at = payload[at] & 0x0F, at + 1
    values: dict[str, _Value] = {}
    if prefix and not count:
        raise ValueError  # an empty map has no value to find it by
    for _ in range(count):
        key, at = _string(payload, at)
        name = prefix + payload[key.begin : key.end].decode()
        if name in values:
            raise ValueError
        if payload[at] & 0xF0 == 0x80:
            inner, at = _map_values(payload, at, f"{name}.")
            values |= inner
        else:
            values[name] = _value(payload, at)
            at = values[name].end
    return values, at


def _value(payload: bytes, at: int) -> _Value:
    first = payload[at]
    if first < 0x80:
        return _Value(at, at + 1, "small")
    if first in _UNSIGNED:
        return _Value(at + 1, at + 1 + _UNSIGNED[first], "integer")
    if first == _FLOAT:
        return _Value(at + 1, at + 9, "float")
    return _string(payload, at)[0]


def _string(payload: bytes, at: int) -> tuple[_Value, int]:
    first = payload[at]
    if first & 0xE0 == 0xA0:
        begin, size = at + 1, first & 0x1F
    elif first == 0xD9:
        begin, size = at + 2, payload[at + 1]
    else:
        raise ValueError
    if begin + size > len(payload):
        raise ValueError
    return _Value(begin, begin + size, "text"), begin + size


def _text(payload: bytes, value: _Value) -> str:
    return payload[value.begin : value.end].decode()
