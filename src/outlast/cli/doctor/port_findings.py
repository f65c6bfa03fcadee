"""Findings of `outlast doctor`: lines that a port changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from outlast.cli.doctor.phase_findings import (
    ScriptFinding,
    at,
    contains,
    draws,
    inline_step,
    writes_inside,
)
from outlast.cli.doctor.training_script import PROTECTED, Step, TrainingScript, last

_COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_object", "all_to_all", "barrier", "broadcast"),
        *("gather", "reduce", "reduce_scatter", "scatter"),
    }
)
_SESSION_LOOPS = frozenset({"session.epochs", "session.batches", "session.enumerate"})
_ONE_LOOP = (
    "a run has one training loop, and another one follows: make stages one loop"
    " (session.epochs(FIRST + SECOND)), or a run each"
)
_ORDER = {"change": 0, "check": 1, "unsafe": 2}


def read_script(
    source: str, others: Mapping[str, str] = MappingProxyType({})
) -> tuple[bool, list[ScriptFinding]]:
    """Return whether an optimizer steps in a script or in `others`, files that it imports, and the
    findings, changes first, by file and line. Raises SyntaxError."""
    script = TrainingScript(source, others)
    found = [*_spawns(script), *_ported_stages(script)]
    if script.steps:
        first = script.steps[0]
        found += [*_start(script), *_protect(script, first), *_loops(script, first)]
        found += [
            *_step(script, first),
            *_evaluations(script, first),
            *writes_inside(script, first),
        ]
        found += _others(script)
        found += _shared_session(script, found)
    for file in sorted({one.file for one in found if "session." in one.after and one.file}):
        reason = "this file has no session: give it to its functions, session = outlast.init()"
        found.append(ScriptFinding(file=file, line=1, kind="check", reason=reason))
    found = sorted(set(found), key=lambda one: (_ORDER[one.kind], one.file, one.line, one.after))
    return bool(script.steps), found


def _start(script: TrainingScript) -> Iterator[ScriptFinding]:
    if not script.imports("outlast"):
        imports = [n for n in script.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
        line = imports[-1].end_lineno or 1 if imports else 1
        yield ScriptFinding(
            line=line, kind="change", reason="below this line", after="import outlast"
        )
    if any(last(call.func) == "init" and "outlast" in ast.unparse(call) for call in script.calls()):
        return
    calls = list(script.calls(script.tree))
    for call in calls:
        function = script.functions.get(last(call.func))
        inner = () if function is None or not script.file(function) else script.calls(function)
        if any(map(_asks_for_rank, (call, *inner))):
            break
    else:
        built = (call for call in calls if isinstance(script.statement(call), ast.Assign))
        call = next((one for one in built if _target(script, one) in script.built), calls[0])
    yield at(
        script,
        script.statement(call),
        "change",
        "above this line: a spare waits for its rank there; init_process_group may stay",
        after="session = outlast.init()",
    )


def _shared_session(script: TrainingScript, found: list[ScriptFinding]) -> Iterator[ScriptFinding]:
    """Yield the line that lets all functions read a session that one of them makes."""
    start = next((one for one in found if one.after == "session = outlast.init()"), None)
    if start is None or start.file:
        return
    functions = [node for node in script.nodes() if isinstance(node, ast.FunctionDef)]

    def around(one: ScriptFinding) -> list[ast.FunctionDef]:
        return [
            each
            for each in functions
            if not script.file(each) and each.lineno <= one.line <= (each.end_lineno or 0)
        ]

    inside = around(start)
    uses = (one for one in found if "session." in one.after and not one.file)
    if inside and any(not set(inside) & set(around(one)) for one in uses):
        reason = "in this function, whose session the others read"
        line = inside[0].lineno
        yield ScriptFinding(line=line, kind="change", reason=reason, after="global session")


def _others(script: TrainingScript) -> Iterator[ScriptFinding]:
    """Yield loops that follow the first one, which a run refuses where they begin."""
    outer = [step.loops[-1] for step in script.steps if step.loops]
    for loop in outer[1:]:
        if loop is not outer[0] and not contains(outer[0], loop):
            yield at(script, loop, "unsafe", _ONE_LOOP, script.text(loop))
    function = script.function_around(outer[0]) if outer else None
    calls = [call for call in script.calls() if function and last(call.func) == function.name]
    for call in calls[1:]:
        yield at(script, call, "unsafe", _ONE_LOOP, script.text(script.statement(call)))


def _ported_stages(script: TrainingScript) -> Iterator[ScriptFinding]:
    """Yield loops of a ported script that follow its first one, and what it protects behind it."""
    loops = [n for n in script.nodes() if isinstance(n, ast.For) and _is_of_session(n.iter)]
    outer = [n for n in loops if not any(n is not each and contains(each, n) for each in loops)]
    for loop in (n for n in outer if any(script.is_behind(n, first) for first in outer)):
        yield at(script, loop, "unsafe", _ONE_LOOP, script.text(loop))
    for call in (one for one in script.calls() if ast.unparse(one.func) == "session.protect"):
        statement = script.statement(call)
        if any(script.is_behind(statement, loop) for loop in outer):
            reason = "session.protect is called once, above the loop: protect all stages there"
            yield at(script, statement, "unsafe", reason, script.text(statement))


def _is_of_session(iterated: ast.expr) -> bool:
    calls = (node for node in ast.walk(iterated) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) in _SESSION_LOOPS for call in calls)


def _asks_for_rank(call: ast.Call) -> bool:
    text = ast.unparse(call)
    reads_rank = any(name in text for name in ("'RANK'", "'LOCAL_RANK'"))
    return last(call.func) == "init_process_group" or (reads_rank and "environ" in text)


def _target(script: TrainingScript, call: ast.Call) -> str:
    statement = script.statement(call)
    is_plain = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    return last(statement.targets[0]) if is_plain else ""  # type: ignore[attr-defined]


def _protect(script: TrainingScript, step: Step) -> Iterator[ScriptFinding]:
    if not step.loops or any(last(call.func) == "protect" for call in script.calls()):
        return
    outer = step.loops[-1]
    visible = script.visible(outer)
    found = {one.name: one.text for kind in PROTECTED for one in visible if one.kind == kind}
    kinds = {one.kind for one in visible}
    missing = {"module": "model", "optimizer": "optimizer"}  # built where no line shows the kind
    found |= {name: "..." for kind, name in missing.items() if kind not in kinds}
    given = ", ".join(f"{name}={text}" for name, text in found.items())
    reason = "above this line: what a new worker receives; add whatever else has a state"
    yield at(script, outer, "change", reason, after=f"session.protect({given})")


def _loops(script: TrainingScript, step: Step) -> Iterator[ScriptFinding]:
    for number, loop in enumerate(step.loops[:2]):
        before = script.text(loop)
        after = _epochs(loop) if number else _batches(loop, alone=len(step.loops) == 1)
        reason = "the loop over epochs" if number else "the loop over batches"
        if not after:
            reason += " goes through an iterator that another process cannot continue: loop over"
            reason += " session.epochs(COUNT)" if number else " session.batches(loader)"
            reason += "" if number else ", and leave it by break where it ends early"
        if "session." not in before:
            yield at(script, loop, "change", reason, before, after)
    for call in script.calls(step.loops[0]) if step.loops else ():
        if draws(call):
            reason = "the loop draws from an iterator that another process cannot continue: loop"
            reason += " over session.batches(loader, until=STEPS), which yields the batches"
            yield at(script, call, "unsafe", reason, script.text(script.statement(call)))
    for loop in step.loops[2:]:
        reason = "a run has one loop over epochs with one over batches in it; make this one the"
        reason += " loop over epochs, or start a run for each of its turns"
        yield at(script, loop, "check", reason, script.text(loop))


def _epochs(loop: ast.For | ast.While) -> str:
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call):
        return ""
    if last(loop.iter.func) != "range":
        return ""
    is_count = len(loop.iter.args) == 1
    count = ast.unparse(loop.iter.args[0] if is_count else loop.iter)
    return f"for {ast.unparse(loop.target)} in session.epochs({count}):"


def _batches(loop: ast.For | ast.While, *, alone: bool) -> str:
    ends = ", epochs=1" if alone else ""
    if isinstance(loop, ast.While):
        return "for _ in session.batches(None, until=STEPS):"
    target = ast.unparse(loop.target)
    target = target[1:-1] if isinstance(loop.target, ast.Tuple) else target
    call = loop.iter
    if isinstance(call, ast.Call) and last(call.func) == "range":
        until = ast.unparse(call.args[-1] if len(call.args) < 3 else call)
        return f"for {target} in session.batches(None, until={until}):"
    if isinstance(call, ast.Call) and last(call.func) == "enumerate":
        if call.args and isinstance(call.args[0], ast.Call):  # of islice(loader, 10), tqdm(loader)
            return ""
        words = [*map(ast.unparse, call.args), *(ast.unparse(each) for each in call.keywords)]
        return f"for {target} in session.enumerate({', '.join(words)}{ends}):"
    if isinstance(call, ast.Call):
        return ""
    return f"for {target} in session.batches({ast.unparse(call)}{ends}):"


def _step(script: TrainingScript, step: Step) -> Iterator[ScriptFinding]:
    if step.use is not None:
        statement = script.statement(step.use)
        before = script.text(statement)
        words = [ast.unparse(step.use.func), *map(ast.unparse, step.use.args)]
        words += [ast.unparse(each) for each in step.use.keywords]
        old, new = ast.unparse(step.use), f"session.run({', '.join(words)})"
        after = ast.unparse(statement).split("\n")[0].replace(old, new)
        if "session.run" not in before:
            reason = "the step: all ranks complete it, or all run it again"
            yield at(script, statement, "change", reason, before, after)
        return
    if not step.loops or any(_is_run(call) for call in script.calls(step.loops[0])):
        return
    body = inline_step(script, step)
    begin, end = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    names = ", ".join(_shared_names(script, begin, end))
    words = f"; it binds {names}, read elsewhere: return them, or declare them" if names else ""
    reason = f"lines {begin} to {end}: make them a function, def train_step(){words}"
    yield at(script, body[0], "change", reason, after="session.run(train_step)")


def _shared_names(script: TrainingScript, begin: int, end: int) -> list[str]:
    """Return the names that lines bind, and that other lines, or these before, read."""
    bound: dict[str, int] = {}
    names = [node for node in script.nodes() if isinstance(node, ast.Name)]
    scope, file = script.function_around(script.steps[0].call), script.file(script.steps[0].call)
    nodes = [
        node
        for node in names
        if script.function_around(node) is scope and script.file(node) == file
    ]
    for node in sorted(nodes, key=lambda one: (one.lineno, one.col_offset)):
        if begin <= node.lineno <= end and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, node.lineno)
    read = {
        node.id
        for node in nodes
        if isinstance(node.ctx, ast.Load)
        and node.id in bound
        and (not begin <= node.lineno <= end or node.lineno < bound[node.id])
    }
    return [name for name in bound if name in read and name != "_"]


def _is_run(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "session.run"


def _evaluations(script: TrainingScript, step: Step) -> Iterator[ScriptFinding]:
    if not step.loops:
        return
    for call in script.calls(step.loops[-1]):
        function = script.functions.get(last(call.func))
        is_bare = ast.unparse(call.func).partition(".")[0] in ("dist", "torch")
        if is_bare and last(call.func) in _COLLECTIVES and not _in_step(script, step, call):
            yield _as_phase(script, call)
        if function is None or function is step.function:
            continue
        trains = any(one.function is function or _has(function, one.call) for one in script.steps)
        reduces = any(last(inner.func) in _COLLECTIVES for inner in script.calls(function))
        methods = {last(inner.func) for inner in script.calls(function)}
        if not trains and (reduces or methods & _reducing(script)):
            yield _as_phase(script, call)


def _as_phase(script: TrainingScript, call: ast.Call) -> ScriptFinding:
    given = [*call.args, *call.keywords]
    words = ", ".join([ast.unparse(call.func), *map(ast.unparse, given)])
    statement = script.statement(call)
    after = ast.unparse(statement).replace(ast.unparse(call), f"session.run({words})")
    reason = "collectives outside of a step are a phase too"
    before, after = script.text(statement), after.split("\n")[0]
    return at(script, statement, "change", reason, before, after)


def _in_step(script: TrainingScript, step: Step, call: ast.Call) -> bool:
    return step.function is None and any(contains(one, call) for one in inline_step(script, step))


def _reducing(script: TrainingScript) -> set[str]:
    """Return the functions and methods of the script that call collectives themselves."""
    return {
        name
        for name, function in script.functions.items()
        if any(last(call.func) in _COLLECTIVES for call in script.calls(function))
    }


def _has(function: ast.FunctionDef, node: ast.AST) -> bool:
    return any(each is node for each in ast.walk(function))


def _spawns(script: TrainingScript) -> Iterator[ScriptFinding]:
    for call in script.calls():
        if last(call.func) == "spawn" and len(call.args) > 0:
            reason = "`outlast run --nproc-per-node N` starts the ranks: call it without spawn"
            yield at(script, call, "unsafe", reason, script.text(script.statement(call)))
