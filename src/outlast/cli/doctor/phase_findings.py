"""Findings of `outlast doctor` inside a phase: what a step writes, and what cannot be repeated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Literal

import msgspec

from outlast.cli.doctor.training_script import Step, TrainingScript, last

_MUTATORS = frozenset(
    {
        *("add", "append", "clear", "extend", "insert", "pop", "popleft", "remove", "setdefault"),
        "update",
    }
)
_COMPUTING = frozenset({"module", "scaler", "optimizer"})
_CLOCKS = frozenset({"time", "perf_counter", "monotonic", "now"})
_STARTERS = frozenset({"Thread", "Process", "Popen", "ThreadPoolExecutor", "fork", "system"})
Kind = Literal["change", "check", "unsafe"]


class ScriptFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the script, or of a `file` that it imports. `after`: what to write there, "" if
    nothing certain can be said."""

    file: str = ""
    line: int
    kind: Kind
    reason: str
    before: str = ""
    after: str = ""


def at(
    script: TrainingScript,
    node: ast.stmt | ast.expr,
    kind: Kind,
    reason: str,
    before: str = "",
    after: str = "",
) -> ScriptFinding:
    file, line = script.file(node), node.lineno
    return ScriptFinding(file=file, line=line, kind=kind, reason=reason, before=before, after=after)


def writes_inside(script: TrainingScript, step: Step) -> Iterator[ScriptFinding]:
    """Yield what the step writes besides its own names, and what cannot be repeated in it."""
    is_inline = step.function is None
    body = inline_step(script, step) if is_inline else step.body
    names = {last(node) for one in body for node in ast.walk(one) if _binds(node)}
    local = set(script.built) if is_inline else names | set(script.built)
    for node in (node for one in body for node in ast.walk(one)):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            reason = f"the step binds {', '.join(node.names)}: carried, or refused by name"
            yield at(script, node, "check", reason)
        elif isinstance(node, ast.Call):
            yield from (at(script, node, *found) for found in _call_inside(node, local))
        elif isinstance(node, ast.expr) and _is_stored(node) and _root(node) not in local:
            reason = f"the step changes {ast.unparse(node)}: carried, or refused by name"
            is_late = step.function is not None and node.lineno > step.call.lineno
            if is_late:
                reason = f"the step changes {ast.unparse(node)} behind {ast.unparse(step.call)}:"
                reason += " do it above, or behind session.run"
            yield at(script, node, "unsafe" if is_late else "check", reason)
    for other in script.steps[1:]:
        if any(contains(one, other.call) for one in body) and _is_second(script, step, other):
            reason = "a second optimizer steps in the same phase: two phases, or"
            reason += " session.run_with_undo"
            yield at(script, other.call, "unsafe", reason)


def _is_second(script: TrainingScript, step: Step, other: Step) -> bool:
    """Return whether another optimizer steps behind a backward pass of its own. Optimizers that
    step one behind the other share a vote."""
    if ast.unparse(step.call.func) == ast.unparse(other.call.func):
        return False
    first, second = sorted((step.call.lineno, other.call.lineno))
    function = script.function_around(step.call)
    inside = script.calls(function) if function is not None else script.calls(script.tree)
    return any(last(c.func) == "backward" and first < c.lineno < second for c in inside)


def contains(statement: ast.stmt, node: ast.AST) -> bool:
    return any(each is node for each in ast.walk(statement))


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _call_inside(call: ast.Call, local: set[str]) -> Iterator[tuple[Kind, str]]:
    name, text = last(call.func), ast.unparse(call)
    if isinstance(call.func, ast.Attribute) and name in _MUTATORS and _root(call) not in local:
        yield (
            "check",
            f"the step changes {ast.unparse(call.func.value)}: carried, or refused by name",
        )
    if name == "open" and len(call.args) > 1 and "r" not in ast.unparse(call.args[1]):
        yield (
            "unsafe",
            "a file is written inside the step, which may run again: write it between steps",
        )
    if name in _CLOCKS and "time" in text:
        yield "check", "a clock is read inside the step: a second attempt sees another time"
    if name in _STARTERS:
        yield "unsafe", f"{name} inside the step outlives an attempt that is run again"
    if draws(call):
        reason = "the step draws its own batch, and a second attempt would get another one: draw it"
        yield (
            "unsafe",
            f"{reason} in the loop, for batch in session.batches(loader), and pass it on",
        )


def inline_step(script: TrainingScript, step: Step) -> list[ast.stmt]:
    """Return the statements of the loop from the first that computes gradients to the last."""
    body = step.loops[0].body if step.loops else []
    indices = [
        number
        for number, one in enumerate(body)
        if _trains(script, one) or contains(one, step.call)
    ]
    return body[indices[0] : indices[-1] + 1] if indices else []


def _trains(script: TrainingScript, statement: ast.stmt) -> bool:
    """Return whether a statement computes, reduces or applies gradients."""
    for call in script.calls(statement):
        owner = last(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        kind = script.built.get(owner or last(call.func))
        if last(call.func) in ("backward", "zero_grad") or kind in _COMPUTING:
            return True
    return False


def draws(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "next"
