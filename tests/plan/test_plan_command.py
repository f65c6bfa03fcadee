"""Refusals, output and figures that all commands of `outlast plan` share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plan.plan_command import Plan

from outlast.errors import EXIT_USAGE, EXIT_USER_ERROR

ASKED = ("interval", "--gpus=1024")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--stategy", "outlast"], "did you mean --strategy?"),
        (["--figur", "x.png"], "did you mean --figure?"),
        (["--costs", "5s"], "did you mean --cost?"),
        (["--cost", "-5s"], "'--cost -5s' needs a number"),
        (["--figure", "."], "must be one of .svg, .png, .pdf"),
    ],
)
def test_a_flag_that_cannot_be_is_named(plan: Plan, flags: list[str], says: str) -> None:
    said = plan(*ASKED, *flags)
    assert said.code == EXIT_USAGE and says in said.err and not said.out


def test_a_figure_that_cannot_be_drawn_is_an_error_of_its_own(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures: pip install 'outlast[figures]'")
    (tmp_path / "here.svg").mkdir()
    said = plan("ettr", "--gpus=1024", f"--figure={tmp_path / 'here.svg'}")
    assert said.code == EXIT_USAGE and "is a directory" in said.err
    said = plan("ettr", "--gpus=1024", "--figure=/proc/x.svg")  # nobody may write there
    assert said.code == EXIT_USER_ERROR and "/proc/x.svg could not be drawn" in said.err
    assert "ETTR" in said.out


def test_a_figure_is_replaced_whole(plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures: pip install 'outlast[figures]'")
    path = tmp_path / "x.svg"
    path.write_text("old")
    assert plan("ettr", "--gpus=1024", f"--figure={path}").code == 0
    assert path.read_text().endswith("</svg>\n") and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_full_disk_behind_stdout_is_an_error(how: list[str]) -> None:
    words = [sys.executable, "-m", "outlast.cli.main", "plan", *ASKED, *how]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_USER_ERROR
    assert "could not be printed in full" in done.stderr and "Traceback" not in done.stderr


def test_a_character_that_the_terminal_lacks_is_escaped() -> None:
    code = "from outlast.cli.output_stream import echo; echo('and so on\\u2026')"
    words = [sys.executable, "-c", code]
    plain = os.environ | {"PYTHONIOENCODING": "latin-1", "COLUMNS": "40"}
    done = subprocess.run(words, capture_output=True, env=plain, check=False)
    assert done.returncode == 0 and rb"\u2026" in done.stdout


def test_nothing_is_cut_off_at_80_columns(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sweep = ["sweep", "--over=gpus=1024,1M", "--over=restart=1min,1h", "--strategy=all"]
    for words in (
        ["reproduce"], ["fields"], ["presets"], ["spares", "--gpus=1M"],
        [*sweep, "--replications=0"],
    ):  # fmt: skip
        said = plan(*words)
        assert said.code == 0 and "\u2026" not in said.out
        assert max(len(line) for line in said.out.splitlines()) <= 80
