"""Reader of pickles without execution: opcodes become plain values, globals become names.

A pickle is a program that may import and call anything. `pickletools` only splits one into opcodes;
the machine here interprets the few that data needs. Callables of a pickle are looked up by name in
the caller's table of builders; nothing is ever imported. A name that is not in the table is refused
(docs/adr/0007-reading-dcp.md).
"""

from __future__ import annotations

import pickletools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outlast.errors import CodecError, CorruptionError

Builder = Callable[..., Any]
_MALFORMED = (
    ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class PickleGlobal:
    """A class, function or constant that a pickle names: only the text "module.name"."""

    name: str


class PickleRecord:
    """An object of a known class, as data: its arguments, and its state."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def field(self, name: str) -> Any:
        """Return a field of its state; None where it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def known_records(*names: str) -> dict[str, Builder]:
    """Return a table in which each of these classes builds a PickleRecord."""

    def maker(name: str) -> Builder:
        return lambda *args: PickleRecord(name, *args)

    return {name: maker(name) for name in names}


def read_pickle(
    data: bytes,
    known: Mapping[str, Builder | None],
    where: str,
    stored: Callable[[Any], Any] | None = None,
    opcodes_max: int = sys.maxsize,
    keys: tuple[type, ...] = (),
) -> Any:
    """Return the value of a pickle (protocols 2 to 5).

    `known`: the allowed names, each with its builder (None: it may be named, not called). `stored`:
    builder for references to objects outside of the pickle. `opcodes_max`: one opcode may create an
    object of 200 bytes. `keys`: the allowed types of keys and set items: numbers and tuples can be
    chosen so that all have one hash. Raises CodecError for a name that is not known, or too many
    opcodes, CorruptionError for an invalid pickle.
    """
    machine = _Machine(known, where, stored, keys)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count == opcodes_max:
                raise CodecError(f"{where}: its pickle is too large for plain values")
            machine.step(opcode.name, argument)
        return machine.stack.pop()
    except _MALFORMED as error:
        raise CorruptionError(f"{where}: no complete pickle ({error}); nothing was read") from error


def record_member(owner: Any, name: Any) -> PickleRecord:
    """Return an enumeration member as Python 3.11 to 3.11.3 pickle it: getattr(class, name)."""
    if not isinstance(owner, PickleGlobal) or not isinstance(name, str):
        raise TypeError("a member of an object that is not a class")
    return PickleRecord(owner.name, name)


def ordered(pairs: Iterable[Any] = ()) -> OrderedDict[Any, Any]:
    """Return an ordered dict of unpickled pairs, with flat keys only."""
    return OrderedDict((_key(key), value) for key, value in pairs)


def flat_set(items: Iterable[Any], kind: type = set) -> Any:
    """Return a set of unpickled items, flat ones only."""
    return kind(map(_key, items))


class _Machine:
    """The stack, marks and memo of the pickle protocol."""

    def __init__(
        self,
        known: Mapping[str, Builder | None],
        where: str,
        stored: Callable[[Any], Any] | None,
        keys: tuple[type, ...],
    ) -> None:
        self.stack: list[Any] = []
        self._keys = keys
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._known = known
        self._where = where
        self._stored = stored

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in _NOTHING:
            raise CodecError(
                f"{self._where}: its pickle has the opcode {name}, which data does not need;"
                " nothing was run"
            )

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def put(self, slot: int | None) -> None:
        self._memo[len(self._memo) if slot is None else slot] = self.stack[-1]

    def get(self, slot: int) -> None:
        self.stack.append(self._memo[slot])

    def drop(self, _: Any) -> None:
        self.stack.pop()

    def marked(self) -> list[Any]:
        """Pop and return all items since the last mark."""
        at = self._marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("its stack is empty")
        items = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return items

    def name(self, text: str) -> None:
        self._name(*text.split(" ", 1))

    def name_from_stack(self, _: Any) -> None:
        self._name(*self.last(2))

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in self._known:
            raise CodecError(
                f"{self._where}: its pickle refers to {full}, which Outlast does not read as data;"
                " nothing was run"
            )
        self.stack.append(PickleGlobal(full))

    def call(self, _: Any) -> None:
        called, arguments = self.last(2)
        build = self._known.get(called.name) if isinstance(called, PickleGlobal) else None
        if build is None:
            what = called.name if isinstance(called, PickleGlobal) else type(called).__name__
            raise CodecError(f"{self._where}: its pickle calls {what}; nothing was run")
        self.stack.append(build(*arguments))

    def reference(self, _: Any) -> None:
        if self._stored is None:
            raise CodecError(f"{self._where}: its pickle refers to something outside of it")
        self.stack.append(self._stored(self.stack.pop()))

    def build(self, _: Any) -> None:
        (state,) = self.last(1)
        target = self.stack[-1]
        if isinstance(target, PickleRecord):
            target.state = state
        elif not isinstance(target, OrderedDict):  # a state dict's attributes are its versions
            raise CodecError(
                f"{self._where}: its pickle sets the state of a {type(target).__name__}"
            )

    def set_items(self, pairs: list[Any]) -> None:
        target = _container(self.stack[-1], dict)
        target.update(zip(map(self.key, pairs[::2]), pairs[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        _container(self.stack[-1], list).extend(items)

    def add(self, items: list[Any]) -> None:
        _container(self.stack[-1], set).update(map(self.key, items))

    def freeze(self, _: Any) -> None:
        self.stack.append(frozenset(map(self.key, self.marked())))

    def key(self, value: Any) -> Any:
        if self._keys and not isinstance(value, self._keys):
            raise TypeError(f"a {type(value).__name__} is no key here")
        return _key(value)

    def push(self, value: Any) -> None:
        self.stack.append(value)


def _key(value: Any) -> Any:
    """Return the key if it is flat: hashing deeply nested tuples would end the process."""
    items = value if isinstance(value, tuple) else (value,)
    if not all(item is None or isinstance(item, _FLAT) for item in items):
        raise TypeError(f"a {type(value).__name__} is no key")
    return value


def _container(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"items are given to a {type(value).__name__}")
    return value


_FLAT = (str, bytes, int, float, complex, PickleGlobal, PickleRecord)
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_NOTHING = {"PROTO", "FRAME", "STOP"}
_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.drop,
    "POP_MARK": lambda machine, _: machine.marked().clear(),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.marked())),
    "TUPLE1": lambda machine, _: machine.push(machine.last(1)),
    "TUPLE2": lambda machine, _: machine.push(machine.last(2)),
    "TUPLE3": lambda machine, _: machine.push(machine.last(3)),
    "FROZENSET": _Machine.freeze,
    "APPEND": lambda machine, _: machine.extend(list(machine.last(1))),
    "APPENDS": lambda machine, _: machine.extend(machine.marked()),
    "SETITEM": lambda machine, _: machine.set_items(list(machine.last(2))),
    "SETITEMS": lambda machine, _: machine.set_items(machine.marked()),
    "ADDITEMS": lambda machine, _: machine.add(machine.marked()),
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BINPERSID": _Machine.reference,
    "BUILD": _Machine.build,
}
