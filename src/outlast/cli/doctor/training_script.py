"""Source of a training script: its steps, the loops around them, and what it builds.

Nothing is imported or run. Files of the script's own folder that it imports are read with it. A
step is a call of `step` on an optimizer or a scaler; the loop over batches is the innermost loop
around it, in its function or around a call of that function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

_FILES_MAX = 50
_BYTES_MAX = 1 << 20
LOOPS = (ast.For, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OPTIMIZERS = frozenset(
    {
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Lion"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    }
)
_KINDS = {"GradScaler": "scaler", "DataLoader": "loader", "StatefulDataLoader": "loader"}
_KINDS |= {"Generator": "generator", "default_rng": "generator", "RandomState": "generator"}
_MODULES = frozenset(
    {
        *("AveragedModel", "DistributedDataParallel", "DDP", "FullyShardedDataParallel"),
        "fully_shard",
    }
)
PROTECTED = ("module", "optimizer", "scheduler", "scaler", "generator", "object")


@dataclass(frozen=True)
class BuiltName:
    """A name that is bound to a module, an optimizer, ..."""

    name: str
    kind: str  # one of PROTECTED
    text: str  # `self.model`
    function: ast.FunctionDef | None  # whose local name it is; None: of the file, or of an object
    around: ast.ClassDef | None  # the class in whose code it is bound
    file: str


@dataclass
class Step:
    """A place where an optimizer steps."""

    call: ast.Call
    function: ast.FunctionDef | None  # that is called for each batch; None: inside of the loop
    use: ast.Call | None = None  # call of `function` in the loop
    loops: list[ast.For | ast.While] = field(default_factory=list)  # innermost first

    @property
    def body(self) -> list[ast.stmt]:
        """Return the statements that a phase would run."""
        if self.function is not None:
            return self.function.body
        return self.loops[0].body if self.loops else []


class TrainingScript:
    """A parsed script, with the files that it imports (`others`, by name). Raises SyntaxError for
    another text than Python."""

    def __init__(self, source: str, others: Mapping[str, str] = MappingProxyType({})) -> None:
        texts = {"": source, **others}
        self._lines = {file: text.split("\n") for file, text in texts.items()}
        trees = {file: ast.parse(text) for file, text in texts.items()}
        self.tree = trees[""]  # of the script itself
        self._file = {node: file for file, tree in trees.items() for node in ast.walk(tree)}
        self._parent = {child: node for node in self._file for child in ast.iter_child_nodes(node)}
        # A function of the script itself hides others of its name.
        found = (node for file in reversed(trees) for node in ast.walk(trees[file]))
        self.functions = {node.name: node for node in found if isinstance(node, ast.FunctionDef)}
        self.names = list(self._built_names())
        self.built = {each.name: each.kind for each in self.names}
        self.steps = [step for call in self.calls() if (step := self._step_of(call)) is not None]

    def calls(self, inside: ast.AST | None = None) -> Iterator[ast.Call]:
        """Yield calls, in the order of their lines, those of the script itself first."""
        nodes = self._file if inside is None else ast.walk(inside)
        found = (node for node in nodes if isinstance(node, ast.Call))
        yield from sorted(found, key=lambda node: (self.file(node), node.lineno, node.col_offset))

    def nodes(self) -> Iterator[ast.AST]:
        """Yield all nodes of all files."""
        yield from self._file

    def file(self, node: ast.AST) -> str:
        """Return the file of a node, "" for the script itself."""
        return self._file[node]

    def imports(self, name: str) -> bool:
        """Return whether the script imports a package."""
        for node in self._file:
            if isinstance(node, ast.Import) and any(_top(a.name) == name for a in node.names):
                return True
            if isinstance(node, ast.ImportFrom) and _top(node.module or "") == name:
                return True
        return False

    def text(self, node: ast.stmt) -> str:
        """Return the first line of a statement."""
        return self._lines[self.file(node)][node.lineno - 1].strip()

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in."""
        while not isinstance(node, ast.stmt):
            node = self._parent[node]
        return node

    def function_around(self, node: ast.AST) -> ast.FunctionDef | None:
        """Return the function whose code a node is in."""
        return next(
            (each for each in self._around(node) if isinstance(each, ast.FunctionDef)), None
        )

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self._parent:
            node = self._parent[node]
            yield node

    def _loops_around(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Return the loops of the same function around a node, innermost first."""
        loops: list[ast.For | ast.While] = []
        inner = node
        for each in self._around(node):
            if isinstance(each, _FUNCTIONS):
                break
            if isinstance(each, LOOPS) and inner in each.body:
                loops.append(each)
            inner = each
        return loops

    def visible(self, node: ast.AST) -> list[BuiltName]:
        """Return what the code around a node can name."""
        function, around = self.function_around(node), self._class_around(node)
        return [
            each
            for each in self.names
            if each.function in (None, function)
            and each.file == self.file(node)
            and ("." not in each.text or (around is not None and each.around is around))
        ]

    def _class_around(self, node: ast.AST) -> ast.ClassDef | None:
        return next((each for each in self._around(node) if isinstance(each, ast.ClassDef)), None)

    def _built_names(self) -> Iterator[BuiltName]:
        classes = {
            node.name
            for node in self._file
            if isinstance(node, ast.ClassDef) and any(last(base) == "Module" for base in node.bases)
            if not node.name.endswith("Loss") or self._has_state(node)
        }
        stateful = {
            node.name
            for node in self._file
            if isinstance(node, ast.ClassDef)
            and {"state_dict", "load_state_dict"} <= _methods(node)
        }
        for node in self._file:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            kind = self._kind(node.value, classes)
            kind = kind or ("object" if last(node.value.func) in stateful else "")
            for target in node.targets:
                if isinstance(target, (ast.Name, ast.Attribute)) and kind:
                    is_local = isinstance(target, ast.Name)
                    function = self.function_around(node) if is_local else None
                    text, around = ast.unparse(target), self._class_around(node)
                    yield BuiltName(last(target), kind, text, function, around, self.file(node))

    def _kind(self, call: ast.Call, classes: set[str]) -> str:
        name, whole = last(call.func), ast.unparse(call.func)
        if name in ("to", "cuda", "compile") and isinstance(call.func, ast.Attribute):
            inner = call.args[0] if name == "compile" and call.args else call.func.value
            return self._kind(inner, classes) if isinstance(inner, ast.Call) else ""
        if name in _OPTIMIZERS:
            return "optimizer"
        if "lr_scheduler" in whole or name.endswith(("LR", "Scheduler")):
            return "scheduler"
        is_torchs = whole.startswith(("nn.", "torch.nn.")) and not name.endswith("Loss")
        is_module = name in classes or name in _MODULES or is_torchs
        return "module" if is_module and name[:1].isupper() else _KINDS.get(name, "")

    def _has_state(self, module: ast.ClassDef) -> bool:
        """Return whether a module's own code gives it buffers or parameters."""
        calls = self.calls(module)
        return any(last(c.func) in ("register_buffer", "Parameter", "Buffer") for c in calls)

    def _step_of(self, call: ast.Call) -> Step | None:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return None
        loops, function = self._loops_around(call), self.function_around(call)
        owner = last(call.func.value)
        kind = self.built.get(owner, "")
        is_step = kind in ("optimizer", "scaler") or owner.lower().startswith(("opt", "scaler"))
        if not is_step and not (not kind and owner and self._clears(owner, function)):
            return None
        if loops:
            outer = self._call_in_loop(function) if function is not None else None
            return Step(call, None, None, [*loops, *(self._loops_around(outer) if outer else [])])
        use = self._call_in_loop(function) if function is not None else None
        if function is None or use is None:
            return Step(call, function)
        if _gets_loss(function):  # which the loop has computed
            return Step(use, None, None, self._loops(use))
        return Step(call, function, use, self._loops(use))

    def _clears(self, owner: str, function: ast.FunctionDef | None) -> bool:
        """Return whether code calls `owner.zero_grad()`, as that of an optimizer's step does."""
        calls = (call.func for call in self.calls(function or self.tree))
        attributes = (each for each in calls if isinstance(each, ast.Attribute))
        return any(each.attr == "zero_grad" and last(each.value) == owner for each in attributes)

    def _loops(self, call: ast.Call) -> list[ast.For | ast.While]:
        """Return the loops around a call, and around the call of its function."""
        loops, function = self._loops_around(call), self.function_around(call)
        outer = self._call_in_loop(function) if function is not None else None
        return [*loops, *(self._loops_around(outer) if outer is not None else [])]

    def _call_in_loop(self, function: ast.FunctionDef) -> ast.Call | None:
        around = self._class_around(function)
        is_object = function.name == "__call__" and around is not None
        names = self._objects_of(around.name) if is_object and around else {function.name}
        for call in self.calls():
            if last(call.func) in names and self._loops_around(call):
                return call
        return None

    def _objects_of(self, name: str) -> set[str]:
        """Return the names that are bound to objects of a class."""
        return {
            last(target)
            for node in self._file
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            for target in node.targets
            if last(node.value.func) == name
        }

    def is_behind(self, node: ast.stmt, first: ast.stmt) -> bool:
        """Return whether the same function comes to `node` after it has run `first`."""
        scopes = [(self.function_around(each), self.file(each)) for each in (first, node)]
        branches = (each for each in self._around(first) if isinstance(each, ast.If))
        others = (each for branch in branches for each in self._other_branch(branch, first))
        is_later = (first.end_lineno or 0) < node.lineno and scopes[0] == scopes[1]
        return is_later and not any(node in ast.walk(each) for each in others)

    @staticmethod
    def _other_branch(branch: ast.If, node: ast.stmt) -> list[ast.stmt]:
        is_first = any(node in ast.walk(each) for each in branch.body)
        return branch.orelse if is_first else branch.body


def imported_files(script: Path, source: str) -> dict[str, str]:
    """Return the Python files of a script's folder that it imports, by their path from there, with
    those that they import, as far as they can be read."""
    found: dict[str, str] = {}
    todo = [source]
    while todo:
        for name in _imports(todo.pop()):
            stem = Path(*name.split("."))
            for file in (stem.with_suffix(".py"), stem / "__init__.py"):
                place = script.parent / file
                if str(file) in found or len(found) >= _FILES_MAX or place == script:
                    continue
                try:
                    with place.open("rb") as opened:
                        text = opened.read(_BYTES_MAX).decode()
                    ast.parse(text)
                except (OSError, SyntaxError, ValueError, RecursionError):
                    continue  # another package's, or nothing that could run
                found[str(file)] = text
                todo.append(text)
    return found


def _imports(source: str) -> Iterator[str]:
    """Yield the dotted names of modules that a source may import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module
            prefix = f"{node.module}." if node.module else ""
            yield from (f"{prefix}{each.name}" for each in node.names if each.name != "*")


def _methods(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef)}


def _gets_loss(function: ast.FunctionDef) -> bool:
    """Return whether a function computes gradients of a loss that it is given: `loss.backward()`,
    `scaler.scale(loss).backward()`."""
    given = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            value = call.func.value
            inner: list[ast.expr] = [value]
            if isinstance(value, ast.Call) and last(value.func) == "scale":
                inner = value.args
            if any(last(each) in given for each in (*inner, *call.args) if each):
                return True
    return False


def last(node: ast.AST) -> str:
    """Return the last name of a dotted expression: `SGD` of `torch.optim.SGD`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _top(name: str) -> str:
    return name.partition(".")[0]
