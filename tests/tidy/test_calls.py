"""Forbidden calls and words in the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Source

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
RENAMING = {
    "atomic_files.py",
    # Relative to an open directory, so that no symbolic link is followed.
    "checkpoint/stores/folder_store.py",
    # The draft is locked before it takes the file's name.
    "checkpoint/stores/directory_ownership.py",
    # The steps of a save, one by one: tests observe them and fail between two.
    "checkpoint/keeper/keeper_disk.py",
    # Parts of a day become durable together, before the manifest that names them.
    "fleet/lake_writer.py",
    # Not durable: all ranks write at once while the agent waits; a file lost is asked for again.
    "worker/flight_recorder_dump.py",
    # Another library fills the draft; a file of a cache that is lost is fetched again.
    "integrations/mosaic_splits.py",
    # Files of the script, moved aside and back; nothing is written.
    "worker/above_init/start_files.py",
}
PATHS = re.compile(r"draft|path|target|temporary|aside")
PLACES = re.compile(r"/(work|tmp/v\d|root)/")


def _calls(source: Source) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def _explained(source: Source, line: int) -> bool:
    """A comment in words on the line, or on one beside it."""
    beside = source.text.splitlines()[max(0, line - 2) : line + 1]
    for text in beside:
        words = text.partition("#")[2]
        if (
            len(re.sub(r"noqa: [A-Z0-9, ]+|type: ignore\S*|pyright: ignore\S*", "", words).split())
            > 2
        ):
            return True
    return False


def test_tests_do_not_sleep(tests: list[Source]) -> None:
    """They wait for a condition, with a deadline."""
    wrong = [
        s.at(n, name) for s in tests for n, name in _calls(s) if name in {"time.sleep", "sleep"}
    ]
    assert wrong == []


def test_sleep_is_explained(package: list[Source]) -> None:
    wrong = [
        s.at(node, name)
        for s in package
        for node, name in _calls(s)
        if name in {"time.sleep", "sleep"} and not _explained(s, node.lineno)
    ]
    assert wrong == []


def test_nothing_is_unpickled(everything: list[Source]) -> None:
    wrong = []
    for source in everything:
        for node in ast.walk(source.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [source.at(node, name) for name in names if name in UNSAFE_MODULES]
        for call, name in _calls(source):
            safe = any(
                k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords
            )
            if name == "torch.load" and not safe:
                wrong.append(source.at(call, "torch.load without weights_only=True"))
    assert wrong == []


def test_only_atomic_files_renames(package: list[Source]) -> None:
    """All other writes go through `open_draft`: fsync, rename, fsync of the directory."""
    wrong = [
        source.at(node, ast.unparse(node))
        for source in package
        if source.path.removeprefix("src/outlast/") not in RENAMING
        for node, name in _calls(source)
        if name in {"os.rename", "os.replace", "shutil.move"}
        or (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in {"rename", "replace"}
            and len(node.args) == 1  # str.replace has two
            and not node.keywords
            and not ("import polars" in source.text and not PATHS.search(name))
        )
    ]
    assert wrong == []


def test_only_config_reads_the_environment(package: list[Source]) -> None:
    wrong = [
        source.at(node, ast.unparse(node))
        for source in package
        if source.room not in ("config", "__init__")  # the façade is imported before config
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT
    ]
    wrong += [
        source.at(node, "from os import environ")
        for source in package
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "os"
    ]
    assert wrong == []


def test_only_commands_print(package: list[Source]) -> None:
    wrong = [
        s.at(node, "print")
        for s in package
        if s.room not in {"cli", "testing"}
        for node, name in _calls(s)
        if name == "print" and not any(keyword.arg == "file" for keyword in node.keywords)
    ]
    assert wrong == []


def test_broad_excepts_have_a_comment(everything: list[Source]) -> None:
    wrong = []
    for source in everything:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = set(re.findall(r"\w+", caught)) & {"Exception", "BaseException", "everything"}
            goes_on = not isinstance(node.body[-1], ast.Raise)
            if broad and goes_on and not _explained(source, node.lineno):
                wrong.append(source.at(node, f"except {caught} without a word of why"))
    assert wrong == []


def test_nothing_is_unfinished(everything: list[Source]) -> None:
    wrong = [
        f"{source.path}:{number}: {line.strip()}"
        for source in everything
        for number, line in enumerate(source.text.splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert wrong == []


def test_no_stubs(package: list[Source]) -> None:
    """`raise NotImplementedError` and functions without a body are promises, not code."""
    wrong = [
        source.at(node, ast.unparse(node))
        for source in package
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node)
    ]
    assert wrong == []


def test_no_mocks(tests: list[Source]) -> None:
    wrong = [
        source.at(node, ast.unparse(node))
        for source in tests
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom | ast.Import) and "mock" in ast.unparse(node).lower()
    ]
    assert wrong == []


def test_no_path_of_one_machine(everything: list[Source]) -> None:
    wrong = [
        f"{source.path}:{number}: {line.strip()}"
        for source in everything
        for number, line in enumerate(source.text.splitlines(), 1)
        if PLACES.search(line) and "PLACES" not in line
    ]
    assert wrong == []


def test_wall_clock_reads_are_listed(root: Path) -> None:
    """But the clock itself, who has no launcher, and a date that no event carries."""
    package = root / "src" / "outlast"
    asking = {
        str(path.relative_to(package))
        for room in ("controller", "data", "launch", "telemetry", "transport", "worker")
        for path in (package / room).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(", path.read_text())
    }
    assert asking == {
        *("telemetry/event_store.py", "worker/worker_events.py", "launch/terms/run_identity.py"),
    }
