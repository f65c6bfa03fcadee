"""Every code block of the tutorial and of the how-to guides is executed, in order.

A block below "`NAME`:" is written to that file. `sh` and `console` blocks are executed by bash;
the output that a `console` block shows must be printed, numbers aside. `python` blocks of a
document share one interpreter. `text` and `diff` blocks are shown only. Nothing is installed:
`pip install --editable .` writes the entry points of `pyproject.toml` to where Python finds them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.documentation.code_blocks import (
    SHOWN_ONLY,
    Block,
    missing_lines,
    read_blocks,
    split_console,
)

from outlast.config import child_environment

pytest.importorskip("torch")
pytestmark = [pytest.mark.documentation, pytest.mark.process]
ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
DEADLINE_S = 500
PIP = """#!/usr/bin/env python
import pathlib
import sys
import tomllib

assert sys.argv[1:] == ["install", "--editable", "."], sys.argv
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
record = pathlib.Path(f"{project['name']}-{project['version']}.dist-info")
record.mkdir()
(record / "METADATA").write_text(
    f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: {project['version']}\\n"
)
lines = []
for group, entries in project["entry-points"].items():
    lines += [f"[{group}]", *(f"{name} = {where}" for name, where in entries.items())]
(record / "entry_points.txt").write_text("\\n".join(lines))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory in which `examples/` is the repository's."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text(PIP)
    pip.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
@pytest.mark.timeout(1500)
def test_every_block_is_executed(document: Path, folder: Path) -> None:
    python = ""
    for block in read_blocks(document):
        where = f"{document.name}:{block.line}"
        if block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            python += f"\n{'#' * 3} {where}\n{block.text}"
        elif block.language in {"sh", "console"}:
            run_shell(block, where, folder)
        else:
            assert block.language in SHOWN_ONLY, f"{where}: a {block.language} block without a file"
    if python:
        (folder / "blocks.py").write_text(python)
        done = execute([sys.executable, "blocks.py"], folder)
        assert done.returncode == 0, f"{document.name}: {done.stdout}"


def run_shell(block: Block, where: str, folder: Path) -> None:
    script, shown = block.text, []
    if block.language == "console":
        script, shown = split_console(block.text)
    done = execute(["bash", "-euo", "pipefail", "-c", script], folder)
    assert done.returncode in block.exit_codes, f"{where}: exit {done.returncode}\n{done.stdout}"
    missing = missing_lines(shown, done.stdout)
    assert missing == [], f"{where}: not printed: {missing}\n{done.stdout}"


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=child_environment(own), text=True, timeout=DEADLINE_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
