"""Headers, document and size of the script catalogue."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.scripts.script_catalogue import IN_THE_SUITE, PLACES, Script, read_catalogue, table

CATALOGUE = read_catalogue()
LINES_MAX = 70


def test_names_are_unique_and_those_of_the_suite_exist() -> None:
    names = [script.name for script in CATALOGUE]
    assert len(set(names)) == len(names)
    assert set(IN_THE_SUITE) <= set(names)


def test_the_document_shows_the_catalogue(request: pytest.FixtureRequest) -> None:
    text = (Path(request.config.rootpath) / "docs" / "scripts.md").read_text()
    assert table(CATALOGUE) in text, "python -m tests.scripts.script_catalogue prints the table"


@pytest.mark.parametrize("script", CATALOGUE, ids=lambda script: script.name)
def test_a_script_is_one_small_idea(script: Script) -> None:
    text = script.path.read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert docstring and "\n" not in docstring
    assert len(text.splitlines()) <= LINES_MAX


@pytest.mark.parametrize("script", CATALOGUE, ids=lambda script: script.name)
def test_faults_are_seeded_and_at_different_steps(script: Script) -> None:
    flags = script.faults("faults")
    assert flags == script.faults("faults")
    assert [script.faults(kind) for kind in PLACES] == [[flag] for flag in flags]
    steps = {flag.partition("step=")[2].partition(",")[0] for flag in flags}
    assert len(steps) == len(flags)
    assert script.faults("undisturbed") == []
