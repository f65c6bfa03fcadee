"""A term that is defined in several places is defined in the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("docs/glossary.md", "docs/format.md", "src/outlast/telemetry/time_accounting.py")


def definition(path: Path, term: str) -> str:
    """From the term's formula to the sentence's end, whatever the mark-up around it."""
    text = " ".join(
        path.read_text().replace("**", "").replace("\N{MULTIPLICATION SIGN}", "x").split()
    )
    found = re.search(rf"\b{term} [·=] ([^.]*)\.", text)
    assert found, f"{path} does not define {term}"
    return found[1]


@pytest.mark.parametrize("term", ["ETTR", "goodput"])
def test_the_definition_is_equal_everywhere(term: str) -> None:
    said = {place: definition(ROOT / place, term) for place in PLACES}
    assert len(set(said.values())) == 1, said
    assert "/ (wall x ranks)" in said[PLACES[0]]
