"""Effects of bytecode: names and attributes that it uses, and liveness across a loop.

A replacement worker needs a name that a loop's body stores only if the body reads it before it
stores it again: `live_after` computes that by backward data-flow analysis.
"""

from __future__ import annotations

import dis
import pathlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import outlast

_OURS = str(pathlib.Path(outlast.__file__).parent) + "/"

_READS = {
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_FAST",
    "LOAD_FAST_CHECK",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_FROM_DICT_OR_GLOBALS",
    "LOAD_FROM_DICT_OR_DEREF",
    "LOAD_FAST_LOAD_FAST",
    "LOAD_FAST_BORROW",
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW",
}
_WRITES = {"STORE_NAME", "STORE_GLOBAL", "STORE_FAST", "STORE_DEREF", "STORE_FAST_STORE_FAST"}
_ENDS = {
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
# Methods of containers, tensors, arrays and files that change them.
_MUTATORS = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "extendleft",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "read",
    "readinto",
    "readline",
    "readlines",
    "remove",
    "reverse",
    "rotate",
    "seek",
    "setdefault",
    "sort",
    "subtract",
    "update",
}


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {sysconfig.get_paths()[name] for name in names}
    found.update(site.getsitepackages())
    found.add(site.getusersitepackages())
    found.add(str(pathlib.Path(outlast.__file__).parent))
    return tuple(each.rstrip("/") + "/" for each in sorted(found))


def is_outlasts_file(name: str) -> bool:
    """Return whether `name` is a file of Outlast itself."""
    return name.startswith(_OURS)


@cache
def is_own_file(name: str) -> bool:
    """Return whether the file is the script's own: the script or a module beside it."""
    if name.startswith("<frozen"):
        return False
    return not name.startswith(_libraries()) and "/site-packages/" not in name


class CodeNames(NamedTuple):
    """Names that some code reads and stores, and whether it changes containers."""

    stored_globals: frozenset[str]
    stored_cells: frozenset[str]  # of an enclosing function
    stored_attributes: frozenset[str]
    outer: frozenset[str]  # read: globals, and variables of an enclosing function
    inner: frozenset[str]  # read: its own variables
    attributes: frozenset[str]  # read
    taken_from: frozenset[str]  # names and attributes whose `get` is called: dicts, queues
    stored_on: frozenset[tuple[str, str]]  # attributes stored, each with the name of its owner
    mutates: bool  # stores items, or calls a method that changes a container

    @property
    def read(self) -> frozenset[str]:
        """Return all names that are read."""
        return self.outer | self.inner | self.attributes


def names_of(code: types.CodeType, offsets: frozenset[int] | None = None) -> CodeNames:
    """Return the names of `code` without nested code; `offsets`: of these instructions only."""
    stored_globals, cells, stored = set[str](), set[str](), set[str]()
    outer, inner, attributes, taken_from = set[str](), set[str](), set[str](), set[str]()
    stored_on, before = set[tuple[str, str]](), ""
    own = {*code.co_varnames, *code.co_cellvars}
    mutates = False
    for each in dis.get_instructions(code):
        if offsets is not None and each.offset not in offsets:
            continue
        name, kind = each.argval, each.opname
        if kind == "STORE_GLOBAL":
            stored_globals.add(name)
        elif kind == "STORE_DEREF" and name in code.co_freevars:
            cells.add(name)
        elif kind == "STORE_ATTR":
            stored.add(name)
            stored_on.add((before, name))
        elif kind in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            mutates = True
        elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(name)
            stored |= {"epoch"} if name == "set_epoch" else set()  # of a library's sampler
            mutates = mutates or name in _MUTATORS or name.endswith("_")
            if name in ("get", "get_nowait"):
                taken_from.add(before)
        elif kind in _READS:
            for name in _argument(each):
                (inner if name in own else outer).add(name)
        last = _argument(each)[-1:]
        before = last[0] if last and isinstance(last[0], str) else ""
    return CodeNames(
        frozenset(stored_globals),
        frozenset(cells),
        frozenset(stored),
        frozenset(outer),
        frozenset(inner),
        frozenset(attributes),
        frozenset(taken_from),
        frozenset(stored_on),
        mutates,
    )


def saves_by_path(code: types.CodeType, until: int | None = None) -> bool:
    """Return whether `code` calls `torch.save` and opens no file; of the instructions before
    `until` only."""
    names = [
        each.argval
        for each in dis.get_instructions(code)
        if each.opname not in ("CACHE", "PUSH_NULL") and (until is None or each.offset < until)
    ]
    return ("torch", "save") in pairwise(names) and "open" not in names


def reads_gradients(code: types.CodeType, offsets: frozenset[int] | None = None) -> bool:
    """Return whether `code`, or a comprehension in it, uses a `.grad` other than to compare it with
    None or to clear it. `offsets`: of these instructions only."""
    names = [
        (each.opname, each.argval)
        for each in dis.get_instructions(code)
        if each.opname != "CACHE" and (offsets is None or each.offset in offsets)
    ]
    for index, (kind, name) in enumerate(names):
        if isinstance(name, types.CodeType) and name.co_name in _COMPREHENSIONS:
            if reads_gradients(name):
                return True
        elif kind == "LOAD_ATTR" and name == "grad":
            after = [pair for pair in names[index + 1 : index + 3] if pair[1] != "data"][:1]
            if not after or not _is_clearing(*after[0]):
                return True
    return False


_OF_NONFINITE = {
    "clip_grad_value_",
    "isfinite",
    "isinf",
    "isnan",
    "nan_to_num",
    "nan_to_num_",
    "nanmean",
    "nansum",
}


def handles_nonfinite(code: types.CodeType) -> bool:
    """Return whether `code` names what deals with numbers that are not finite, or uses a `.grad`,
    hence may handle such numbers itself."""
    return not _OF_NONFINITE.isdisjoint(code.co_names) or reads_gradients(code)


def _is_clearing(kind: str, name: object) -> bool:
    """Return whether this instruction, after a `.grad`, compares it with None or clears it."""
    if kind in ("LOAD_ATTR", "LOAD_METHOD"):
        return name in ("zero_", "detach_")
    return kind.startswith("POP_JUMP") or (kind == "LOAD_CONST" and name is None)


def nested(code: types.CodeType, offsets: frozenset[int] | None = None) -> Iterator[types.CodeType]:
    """Yield the code of functions, classes and comprehensions that `code` defines, at any depth.
    `offsets`: only of those that these instructions define."""
    for each in dis.get_instructions(code):
        codes = each.argval
        if isinstance(codes, types.CodeType) and (offsets is None or each.offset in offsets):
            yield codes
            yield from nested(codes)


def _argument(each: dis.Instruction) -> tuple[str, ...]:
    value = each.argval
    return value if isinstance(value, tuple) else (value,)


_GATHERS = {"LIST_APPEND", "SET_ADD", "MAP_ADD"}
_STEPS = {"next", "__next__", "send"}  # calls that take one value


def gathering(code: types.CodeType, offset: int) -> str:
    """Return what gathers the values that the instruction at `offset` takes from an iterator, where
    no other process could read them: "a comprehension" or "list(...)"; "" for a `for` statement,
    `yield from` and `next`."""
    all_ = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    index = next((i for i, each in enumerate(all_) if each.offset == offset), 0)
    each = all_[index]
    if each.opname == "FOR_ITER":
        return "a comprehension" if _is_gathered(all_, each) else ""
    if each.opname in ("SEND", "YIELD_VALUE", "RESUME"):
        return ""
    names = [name.removeprefix(".") for name in _names_within(all_, each)]
    if _STEPS & set(names):
        return ""
    return f"{names[0]}(...)" if names and each.opname.startswith("CALL") else "an expression"


def _is_gathered(all_: list[dis.Instruction], loop: dis.Instruction) -> bool:
    """Return whether a comprehension gathers what its `loop` computes: `[...]`, in a frame of its
    own or, from Python 3.12 on, in the frame around it."""
    loops = [each for each in all_ if each.opname == "FOR_ITER"]
    for each in all_:
        if each.opname in _GATHERS and each.arg is not None and each.arg > 1:  # 1: `[*a, b]`
            around = [one for one in loops if one.offset < each.offset < one.argval]
            if loop in around[1 - each.arg :]:  # MAP_ADD 2, LIST_APPEND 2: the innermost loop
                return True
    return False


def _names_within(all_: list[dis.Instruction], whole: dis.Instruction) -> list[str]:
    """Return the names that the expression of instruction `whole` reads, in order; those of
    attributes as ".name"."""
    where = whole.positions
    if where is None or None in where:
        return []
    begin, end = (where.lineno, where.col_offset), (where.end_lineno, where.end_col_offset)
    return [
        name
        for each in all_
        if (at := each.positions) is not None and None not in at
        if begin <= (at.lineno, at.col_offset) and (at.end_lineno, at.end_col_offset) <= end  # type: ignore[operator]
        for name in (_argument(each) if each.opname in _READS else _attribute(each))
    ]


def _attribute(each: dis.Instruction) -> list[str]:
    is_read = each.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return [f".{each.argval}"] if is_read and isinstance(each.argval, str) else []


def iterated_names(code: types.CodeType, offset: int) -> set[str]:
    """Return the names in the expression that the `for` at `offset` iterates over, of attributes as
    ".name"."""
    all_ = list(dis.get_instructions(code))
    index = next((i for i, each in enumerate(all_) if each.offset == offset), 0)
    if all_[index].opname != "FOR_ITER":
        return set()
    # The last instruction of the expression has the position of the whole expression. FOR_ITER and
    # GET_ITER have it only from Python 3.12 on; before, theirs is that of the statement.
    before = [i for i in all_[:index] if i.opname not in ("GET_ITER", "EXTENDED_ARG", "CACHE")]
    return set(_names_within(all_, before[-1]))


class CodeFlow:
    """The control flow of one function or module."""

    def __init__(self, code: types.CodeType) -> None:
        self._code = code
        self._all = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
        self._at = {each.offset: index for index, each in enumerate(self._all)}
        self._next = [self._successors(index) for index in range(len(self._all))]

    def _successors(self, index: int) -> list[int]:
        each = self._all[index]
        found = []
        if each.opname not in _ENDS and index + 1 < len(self._all):
            found.append(index + 1)
        if each.opcode in _JUMPS:
            found.append(self._at[each.argval])
        found += [
            self._at[entry.target]
            for entry in dis.Bytecode(self._code).exception_entries  # type: ignore[attr-defined]
            if entry.start <= each.offset < entry.end
        ]
        return found

    def _body(self, offset: int) -> list[int]:
        """Return the index of the instruction after the one at `offset`; empty at the end."""
        # During a call, the offset may be that of the call's inline cache.
        index = max(i for i, each in enumerate(self._all) if each.offset <= offset)
        return [index + 1] if index + 1 < len(self._all) else []

    def reachable(self, offset: int) -> frozenset[int]:
        """Return the offsets of the instructions that may run after the one at `offset`."""
        todo, visited = self._body(offset), set[int]()
        while todo:
            index = todo.pop()
            if index not in visited:
                visited.add(index)
                todo += self._next[index]
        return frozenset(self._all[index].offset for index in visited)

    def stored(self, offsets: Iterable[int]) -> set[str]:
        """Return the names that the instructions at `offsets` bind."""
        return {
            name
            for offset in offsets
            for each in (self._all[self._at[offset]],)
            if each.opname in _WRITES or each.opname == "STORE_FAST_LOAD_FAST"
            for name in _argument(each)[: 1 if each.opname == "STORE_FAST_LOAD_FAST" else None]
        }

    def live_after(self, offset: int, read_by_calls: frozenset[str]) -> set[str]:
        """Return the names that may be read after `offset` before they are bound again.
        `read_by_calls`: names that called functions may read."""
        live: list[set[str]] = [set() for _ in self._all]
        changed = True
        while changed:
            changed = False
            for index in range(len(self._all) - 1, -1, -1):
                after = set[str]().union(*(live[n] for n in self._next[index]))
                before = self._before(self._all[index], after, read_by_calls)
                if before != live[index]:
                    live[index], changed = before, True
        return set[str]().union(*(live[n] for n in self._body(offset)))

    def _before(
        self, each: dis.Instruction, after: set[str], read_by_calls: frozenset[str]
    ) -> set[str]:
        kind = each.opname
        if kind == "STORE_FAST_LOAD_FAST":
            stored, read = _argument(each)
            return (after | {read}) - {stored} if read != stored else after - {stored}
        if kind in _WRITES:
            return after - set(_argument(each))
        if kind.startswith("DELETE_") and kind in ("DELETE_NAME", "DELETE_FAST", "DELETE_GLOBAL"):
            return after - {each.argval}
        if kind in _READS:
            return after | set(_argument(each))
        if kind.startswith("CALL") or kind in ("FOR_ITER", "SEND", "BINARY_OP", "COMPARE_OP"):
            return after | read_by_calls
        return after


def is_call_of_script() -> bool:
    """Return whether the script's code, and not an import, caused the event of an audit hook.

    For use by the function that the hook calls.
    """
    try:
        frame = sys._getframe(3)  # noqa: SLF001 - an audit hook has no other way to its caller
    except ValueError:  # nothing called it
        return False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(("<frozen importlib", _OURS)):
            return False
        if is_own_file(name):
            return True
        frame = frame.f_back
    return False
