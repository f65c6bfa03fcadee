"""Each part of the controller's state is written by one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from outlast.config import Limits
from outlast.controller.controller_state import ControllerState
from outlast.controller.state_machine import initial

if TYPE_CHECKING:
    from conftest import Source

# part -> the modules that may write it
WRITERS = {
    "audit": {"audit_protocol", "corruption"},
    "budgets": {"state_parts"},
    "clock": {"state_parts"},
    "cuts": {"member_tables"},
    "ending": {"run_ending"},
    "findings": {"planned_migration"},
    "inbox": {"state_parts"},
    "incident": {"incident_response"},
    "intervals": {"interval_updates"},
    # Every module changes a worker's record, by methods of Members.
    "notices": {"notice_deadlines"},
    "members": {"member_tables", "membership"},
    "partners": {"member_tables"},
    "placement": {"node_placement"},
    "progress": {"state_parts"},
    "reports": {"audit_protocol"},
    "releases": {"node_release"},
    "saves": {"checkpoint_tracking"},
    "shared": {"shared_values"},
    "stragglers": {"straggler_rows"},
    "term": {"run_start"},
    "units": {"member_tables", "shrinking"},
}
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip
ROOMS = {"controller", "testing"}  # and every module that imports the state or the state machine
CLASSES = {str(ControllerState.__annotations__[part]).rpartition(".")[-1]: part for part in WRITERS}


class _Place(NamedTuple):
    """What an expression means: the state, one of its parts, or a field of a part."""

    part: str = ""
    is_field: bool = False


class _Writes(ast.NodeVisitor):
    """Collects (part or field of the state, node) of every write."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self._names: dict[str, _Place | None] = {}

    def _place(self, node: ast.AST) -> _Place | None:
        if isinstance(node, ast.Name):
            return self._names.get(node.id, _Place() if node.id == "state" else None)
        if not isinstance(node, ast.Attribute):
            return None
        if node.attr in ("state", "_state"):
            return _Place()
        above = self._place(node.value)
        if above is None or above.is_field:
            return None
        if above.part:
            return _Place(above.part, is_field=True)
        return _Place(node.attr) if node.attr in WRITERS else None

    def _written(self, target: ast.AST) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._written(each)
        elif isinstance(target, ast.Starred):
            self._written(target.value)
        elif isinstance(target, ast.Attribute):
            place = self._place(target.value)
            if place is not None and not place.is_field:
                self.found.append((place.part or target.attr, target))
        elif isinstance(target, ast.Subscript):
            place = self._place(target.value)
            if place is not None and place.is_field:
                self.found.append((place.part, target))

    def _named(self, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = self._place(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its_value in zip(target.elts, value.elts, strict=False):
                self._named(each, its_value)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._written(target)
            self._named(target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._written(node.target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._written(node.target)
        if node.value is not None:
            self._named(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._named(node.target, node.value)
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._written(target)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(attr=attr, value=value) if attr in MUTATORS:
                place = self._place(value)
                if place is not None and place.is_field:
                    self.found.append((place.part, node))
            case ast.Name(id="setattr") | ast.Attribute(attr="force_setattr"):
                place = self._place(node.args[0])
                if place is not None:
                    self.found.append((place.part or "setattr", node))
            case _:
                pass
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        part = CLASSES.get(node.name, "")
        own = _Place(part) if part or node.name == "ControllerState" else None
        for each in node.body:
            self._names = {"self": own}
            self.visit(each)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._names
        self._names = dict(outer)
        for argument in (*node.args.args, *node.args.kwonlyargs):
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            annotation = annotation.rpartition(".")[-1]
            if annotation in CLASSES:
                self._names[argument.arg] = _Place(CLASSES[annotation])
            elif annotation == "ControllerState":
                self._names[argument.arg] = _Place()
        self.generic_visit(node)
        self._names = outer


def writes(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (part, node) of every write of the state in a module."""
    visitor = _Writes()
    visitor.visit(tree)
    yield from visitor.found


def _reads_the_state(source: Source) -> bool:
    imports = ("controller_state", "state_machine", "state_parts")
    return source.room in ROOMS or any(
        f"outlast.controller.{name}" in source.text for name in imports
    )


def test_each_part_is_written_by_its_owner(package: list[Source]) -> None:
    wrong = []
    owners = set[tuple[str, str]]()
    for source in filter(_reads_the_state, package):
        module = source.path.rsplit("/", 1)[-1].removesuffix(".py")
        for part, node in writes(source.tree):
            owners.add((part, module))
            if module not in WRITERS.get(part, ()):
                wrong.append(source.at(node, f"{module} writes {part}"))
    assert wrong == []
    assert owners == {(part, module) for part, modules in WRITERS.items() for module in modules}


def test_every_field_is_a_part_or_a_constant() -> None:
    constants = {"world", "spares", "limits", "policy", "migrate_on", "placement", "recovery"}
    assert set(ControllerState.__struct_fields__) == WRITERS.keys() | constants


def test_the_document_lists_the_parts(root: Path) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (`[a-z_`, ]+`) \|$", _state_section(root), re.MULTILINE
    )
    assert {part: set(re.findall(r"\w+", modules)) for part, modules in rows} == WRITERS


def _state_section(root: Path) -> str:
    text = (root / "docs" / "protocol.md").read_text()
    return text.split("\n## State\n")[1].split("\n## ")[0]


def test_a_copy_shares_no_table() -> None:
    state = initial(2, 0, Limits())
    copied = state.copy()
    for part in WRITERS.keys() - {"audit", "placement"}:  # frozen
        one, other = getattr(state, part), getattr(copied, part)
        assert one is not other
        for field in one.__struct_fields__:
            if isinstance(getattr(one, field), dict):
                assert getattr(one, field) is not getattr(other, field), f"{part}.{field}"


@pytest.mark.parametrize(
    "code",
    [
        "turn.state.findings.unmoved = ()",
        "a, turn.state.findings.unmoved = 1, ()",
        "state.findings.moves['a'] = ('w', 1)",
        "del self._state.findings.moves['a']",
        "state.findings.moves.pop('a', None)",
        "state.findings = Findings()",
        "findings = turn.state.findings\nfindings.unmoved = ()",
        "moves = state.findings.moves\nmoves.update({})",
        "now, state = turn.now_ns, turn.state\nstate.findings.moves |= {}",
        "def f(part: Findings):\n    part.unmoved += ('a',)",
        "def f(any: ControllerState):\n    any.findings.calm['a'] = 1",
        "if (known := state.findings.warned):\n    known.clear()",
        "setattr(state.findings, 'unmoved', ())",
        "class Findings:\n    def f(self):\n        self.unmoved = ()",
    ],
)
def test_every_way_to_write_is_found(code: str) -> None:
    assert [part for part, _ in writes(ast.parse(code))] == ["findings"]


@pytest.mark.parametrize(
    "code",
    [
        "findings = turn.state.findings\nfindings = replace(findings)",
        "moves = dict(state.findings.moves)\nmoves['a'] = 1",
        "body.state = 'idle'",
        "moves[0] = state.findings.moves.get('a')",
    ],
)
def test_reading_is_no_write(code: str) -> None:
    assert list(writes(ast.parse(code))) == []
