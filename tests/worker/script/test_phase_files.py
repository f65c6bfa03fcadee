"""Files that phases, or the code between them, read and write: refused, or reported, by name."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.worker.script.simulated_phases import Session, play, refusal

from outlast.errors import PhaseError
from outlast.worker.script import bytecode, reachable_values, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values, bytecode):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


UPDATES = {
    "a counter": "path.write_text(str(int(path.read_text()) + 1))",
    "in place": "file = path.open('r+'); file.write('7'); file.close()",
    "by a rename": """
            count = int(path.read_text())
            draft.write_text(str(count + 1))
            draft.replace(path)
        """,
    "by NumPy": "np.save(path, np.load(path) + 1)",
}


def script(body: str, between: str = "pass", path: Path = Path("none")) -> str:
    body, between = body.strip(), between.strip()
    return f"""
        from pathlib import Path
        path, draft = Path({str(path)!r}), Path({str(path.with_name("draft"))!r})
        def step(i):
            {body}
            session.step()
        for i in session.batches(5):
            session.run(step, i)
            {between}
        """


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "count.npy"
    path.write_text("3")
    return path


@pytest.mark.parametrize("kind", UPDATES)
def test_a_file_that_a_phase_updates_is_refused(path: Path, kind: str) -> None:
    """Each rehearsal would update it once more, also in a run without a failure."""
    if kind == "by NumPy":
        import numpy as np

        np.save(path, np.arange(2))
    text = refusal(script(UPDATES[kind], path=path))
    assert f"step reads {path} and then writes it" in text and "session.state" in text


def test_a_first_update_in_a_later_step_is_refused_there(path: Path) -> None:
    body = f"if i == 4: {UPDATES['a counter']}"
    assert f"step reads {path}" in refusal(script(body, path=path))
    assert path.read_text() == "4"


def notes_of(text: str) -> list[str]:
    session = Session()
    play(text, session)
    return session.notes


def test_a_file_that_a_phase_reads_or_writes_anew_is_allowed(path: Path) -> None:
    assert notes_of(script("rate = float(path.read_text())", path=path)) == []
    assert notes_of(script("path.write_text(str(i))", path=path)) == []
    assert notes_of(script("draft.write_text('1'); draft.replace(path)", path=path)) == []
    assert notes_of(script("float(path.read_text())", "path.write_text(str(i))", path)) == []


def test_a_phase_that_appends_and_updates_between_phases_are_reported_once(path: Path) -> None:
    (told,) = notes_of(script("file = path.open('a'); file.write('7'); file.close()", path=path))
    assert f"step appends to {path}: lines are appended once per attempt" in told
    assert path.read_text() == "3" + 7 * "7"  # five steps, and two rehearsals
    path.write_text("3")
    (told,) = notes_of(script("pass", UPDATES["a counter"], path))
    assert f"code between phases reads {path} and then writes it" in told


@pytest.mark.parametrize("where", ["phase", "between"])
def test_iterating_over_the_lines_of_an_open_file_is_refused(tmp_path: Path, where: str) -> None:
    """Each attempt would go on where the last one stopped."""
    body, between = ("next(data)", "pass") if where == "phase" else ("pass", "next(data)")
    with pytest.raises(PhaseError) as refused:
        play_with_file(tmp_path, "r", script(body, between))
    assert "played.data, a TextIOWrapper whose position cannot be read" in str(refused.value)


def play_with_file(folder: Path, mode: str, text: str) -> list[str]:
    path = folder / "data.txt"
    path.write_text("1\n2\n" * 50)
    session = Session()
    with path.open(mode) as data:
        vars(session)["data"] = data
        play(text.replace("def step", "data = session.data\n        def step"), session)
    return session.notes


def test_an_open_file_may_be_written_or_read_at_chosen_places(tmp_path: Path) -> None:
    assert play_with_file(tmp_path, "r", script("data.seek(2 * i); data.read(2)")) == []
    assert play_with_file(tmp_path, "w", script("data.write('x')")) == []


SAVES = {
    "torch.save(1, 'best.pt')": True,
    "def keep(): torch.save(1, 'best.pt')\nkeep()": True,
    "with open('best.pt', 'wb') as file: torch.save(1, file)": False,
    "def keep(): torch.save(1, 'best.pt')": False,
    "torch.load": False,
}


@pytest.mark.parametrize("top", SAVES)
def test_a_file_that_the_top_gives_to_torch_by_its_path_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join([top, "session.script.at_protect()", "torch.save(2, 'later.pt')"])
    notes = notes_of(textwrap.indent(f"\n{text}", "    "))
    assert ["calls torch.save" in note for note in notes] == [True] * SAVES[top]


def test_files_between_phases_are_not_those_of_the_session(path: Path) -> None:
    """A save is a phase too: what the loop has read and written is reported, not refused."""
    session = Session()
    session.script.files._read.add(str(path))
    session.script.files._rewritten.add(str(path))
    session.script.begin_phase("outlast.checkpoint", None)
    session.script.complete_phase("outlast.checkpoint")
    assert session.notes == []
    session.script.begin_phase("step", lambda: None)
    (told,) = session.notes
    assert f"code between phases reads {path} and then writes it" in told
