"""Help texts: summary lines, full docstrings, and unwritable output."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from outlast.cli.main import COMMANDS, GROUPS, main
from outlast.errors import EXIT_USER_ERROR

LISTS = {"": COMMANDS, **{name: group.COMMANDS for name, group in GROUPS.items()}}
EVERY = [
    ([*group.split(), name], *said) for group, listed in LISTS.items()
    for name, said in listed.items()
]  # fmt: skip
COLUMNS = 80


def docstring(words: list[str], where: str) -> str:
    """What a command's function says above its parameters."""
    module, _, function = where.partition(":")
    found = import_module(".".join(["outlast.cli", *words[:-1], module]))
    text = inspect.getdoc(getattr(found, function)) or ""
    return text.partition("\n\nParameters\n")[0]


@pytest.mark.parametrize(("words", "where", "line"), EVERY)
def test_a_commands_help_is_its_docstring_and_the_list_has_its_first_line(
    words: list[str],
    where: str,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if words == ["replay"]:
        pytest.importorskip("torch", reason="`outlast replay` runs a training script")
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    said = docstring(words, where).splitlines()
    assert said[0] == line and not any(said[1:2])
    assert max(map(len, said)) <= COLUMNS, "cyclopts keeps the lines of what follows the first"
    assert main([*words, "--help"]) == 0
    usage, _, *rest = capsys.readouterr().out.splitlines()
    assert usage.startswith(f"Usage: outlast {' '.join(words)}") and rest[: len(said)] == said


@pytest.mark.parametrize("group", GROUPS)
def test_a_list_has_the_lines(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text and line in text for name, (_, line) in LISTS[group].items())


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["--version"], ["plan"], ["plan", "--help"], ["plan", "ettr", "--help"],
        ["run", "--help"],
    ],
)  # fmt: skip
def test_help_on_a_full_disk_or_closed_pipe_is_no_traceback(words: list[str]) -> None:
    command = [sys.executable, "-m", "outlast", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_USER_ERROR and "Traceback" not in done.stderr
    assert "could not be printed in full" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does that has seen enough
    with os.fdopen(writer, "w") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
