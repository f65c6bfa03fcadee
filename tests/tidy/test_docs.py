"""Documents: valid links, existing files and commands, defined words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.cli import main

FENCE = re.compile(r"^```(?:sh|console|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPERATORS = {"|", ">", ">>", "&", "&&", "||", ";"}
CODE_PATH = re.compile(r"`((?:src|docs|tests|examples|benchmarks|conformance)/[\w./-]+)`")


def _commands(documents: list[Path], program: str) -> Iterator[tuple[Path, list[str]]]:
    """Every line of a shell block that starts `program`, without prompt, comment, continuation."""
    for document in documents:
        for block in FENCE.findall(document.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                end = next((k for k, word in enumerate(words) if word in OPERATORS), len(words))
                if words[:1] == [program]:
                    yield document, words[1:end]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _headings(document: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {_anchor(line.lstrip("#")) for line in text.splitlines() if line.startswith("#")}


def test_links_lead_somewhere(documents: list[Path]) -> None:
    broken = []
    for document in documents:
        for link in LINK.findall(document.read_text()):
            if re.match(r"[a-z]+:", link):
                continue  # another host's page is not ours to check
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            missing = not target.exists() or (anchor and anchor not in _headings(target))
            broken += [f"{document}: {link}"] if missing else []
    assert broken == []


def test_no_document_has_marks_of_a_merge(documents: list[Path]) -> None:
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [str(each) for each in documents if marks.search(each.read_text())] == []


def test_the_index_of_commands_names_each(root: Path) -> None:
    index = (root / "docs" / "reference" / "commands.md").read_text()
    pages = set(re.findall(r"^commands/(\w+)$", index, re.MULTILINE))
    assert pages == {"run", *main.COMMANDS, *main.GROUPS}


def test_files_that_documents_name_exist(documents: list[Path], root: Path) -> None:
    named = {(d, path) for d in documents for path in CODE_PATH.findall(d.read_text())}
    assert [f"{d}: {path}" for d, path in sorted(named) if not (root / path).exists()] == []


def test_functions_in_the_paths_through_the_code_exist(root: Path) -> None:
    """In docs/architecture.md, a row's functions and classes are defined in its modules."""
    missing, rows = [], 0
    for line in (root / "docs" / "architecture.md").read_text().splitlines():
        cells = line.strip("|").split("|")
        modules = re.findall(r"`([\w/]+\.py)`", cells[1]) if len(cells) == 3 else []
        if not modules:
            continue
        rows += 1
        text = "".join((root / "src/outlast" / module).read_text() for module in modules)
        defined = set(re.findall(r"\b(?:def|class) (\w+)", text))
        for function in re.findall(r"`([\w.]+)`", cells[2]):
            missing += [f"{function}: {modules}"] if set(function.split(".")) - defined else []
    assert rows > 20, "the tables of paths were not found: the pattern is broken"
    assert missing == []


def test_make_targets_exist(documents: list[Path], root: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (root / "Makefile").read_text(), re.MULTILINE))
    asked = [(d, word) for d, words in _commands(documents, "make") for word in words]
    assert asked, "no document says `make demo`: the pattern is broken"
    wrong = [f"{d}: make {word}" for d, word in asked if "=" not in word and word not in targets]
    assert wrong == []


def test_scripts_exist(documents: list[Path], root: Path) -> None:
    scripts = [
        (d, next((word for word in words if word.endswith(".py")), None))
        for d, words in _commands(documents, "python")
    ]
    assert [
        f"{d}: {script}"
        for d, script in scripts
        # A guide may show the script itself, below its name.
        if script and not (root / script).exists() and f"`{script}`:\n" not in d.read_text()
    ] == []


def test_outlast_commands_parse(documents: list[Path], root: Path) -> None:
    """Each `outlast ...` line is taken by the real parser; nothing is started."""
    from outlast.cli.main import application

    pytest.importorskip("torch", reason="torchrun's parser owns the flags of `outlast run`")
    from outlast.launch.torchrun_arguments import parse

    commands = list(_commands(documents, "outlast"))
    assert commands, "no document shows `outlast`: the pattern is broken"
    for _, words in commands:
        if words[:2] == ["run", "--resume"]:  # script and flags are those of a run directory
            assert {*words[3:]} <= {"--plain", "--json"}
        elif words[0] == "run":
            example = str(root / "examples/train_gpt.py")  # where a document says train.py
            parse([example if word.endswith(".py") else word for word in words[1:]])
        else:
            application().parse_args(words, exit_on_error=False, print_error=False)
