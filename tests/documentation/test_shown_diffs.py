"""Diffs in README, tutorial and guide are those of the plain and ported scripts in examples/."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tests.documentation.side_by_side import side_by_side

ROOT = Path(__file__).parents[2]
PLAIN = (ROOT / "examples" / "plain_ddp.py").read_text().splitlines()
PORTED = (ROOT / "examples" / "ported_ddp.py").read_text().splitlines()
IMPORTS = "import torch"  # the docstrings above it differ as a matter of course


def shown_diff(document: Path) -> list[str]:
    blocks = re.findall(r"^```diff\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"{document} has {len(blocks)} diffs"
    return blocks[0].splitlines()


def test_the_tutorial_shows_the_whole_diff() -> None:
    plain, ported = (lines[lines.index(IMPORTS) :] for lines in (PLAIN, PORTED))
    expected = [
        "@@" if line.startswith("@@") else line
        for line in difflib.unified_diff(plain, ported, lineterm="")
    ][3:]
    assert shown_diff(ROOT / "docs" / "tutorial.md") == expected


def test_the_lines_in_the_readme_are_in_the_scripts() -> None:
    """In their order; `...` stands for anything."""
    shown = [line for line in shown_diff(ROOT / "README.md") if line.strip() != "..."]
    for script, other in ((PLAIN, "+"), (PORTED, "-")):
        found = iter(script)
        missing = [line for line in shown if line[0] != other and line[1:] not in found]
        assert missing == []


def test_the_guide_shows_whole_diffs_of_the_longer_ports() -> None:
    text = (ROOT / "docs" / "howto" / "port_a_script.md").read_text()
    text = text[text.index("## Two longer ports") :]
    shown = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    examples = ROOT / "examples"
    for block, name in zip(shown, ("gpt", "classifier"), strict=True):
        plain, ported = (examples / f"{kind}_{name}.py" for kind in ("plain", "ported"))
        assert block.splitlines() == side_by_side(plain, ported)
        assert sum(line.startswith("+") for line in block.splitlines()) <= 12
