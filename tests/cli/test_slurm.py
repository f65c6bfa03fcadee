"""`outlast slurm submit` where there is no Slurm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "train me.py").touch()
    return "train me.py"


def submit(*words: str) -> int:
    return main(["slurm", "submit", *words])


def test_the_file_is_printed(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--print", "--", "--nproc-per-node=8", script, "--name=a b") == EXIT_DONE
    text = capsys.readouterr().out
    assert "#SBATCH --job-name=train_me\n" in text
    assert "--nproc-per-node=8 'train me.py' '--name=a b'\n" in text
    assert "#SBATCH --signal=USR2@120\n" in text
    assert "outlast run --run-dir" in text and "--notice-signal=USR2 --notice-time=120s" in text
    assert submit("--print", "--json", "--", script) == EXIT_DONE
    shown = json.loads(capsys.readouterr().out)
    assert shown["job"] == "" and shown["script"].startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    "words", [("--nnodes=2",), ("--notice-signal=TERM", "--notice-time=9s")], ids=["nodes", "own"]
)
def test_the_time_limit_of_several_nodes_or_with_a_notice_of_ones_own_is_sigterm(
    script: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert submit("--print", "--notice=300", "--", *words, script) == EXIT_DONE
    text = capsys.readouterr().out
    assert "#SBATCH --signal=TERM@300\n" in text and "USR2" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node=2", "missing.py"], "cannot find training script missing.py"),
        (["--nprocs=2", "train me.py"], "unrecognized arguments: --nprocs=2"),
        (["--nnodes=3:2", "train me.py"], "--nnodes 3:2: give the number of nodes"),
        ([], "no training script was given"),
        (["train me.py"], "sbatch is not installed here; nothing was submitted"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_queued(
    script: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert submit("--", *words) == EXIT_USAGE
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in printed
