"""Shell completion: commands by cyclopts, flags of `outlast run` from its own parser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def install(home: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outlast", "--install-completion", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(home), **variables},
        check=False,
    )


def script_of(home: Path) -> Path:
    (found,) = [path for path in home.rglob("*outlast*") if path.is_file()]
    return found


def test_bash_completes_commands_and_flags_of_run(tmp_path: Path) -> None:
    assert install(tmp_path, "--shell", "bash").returncode == 0

    def complete(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _outlast; echo ${{COMPREPLY[@]}}"
        command = ["bash", "-c", f"source {script_of(tmp_path)}; {ask}"]
        out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return out.stdout.split()

    (tmp_path / "train.py").touch()
    assert complete("outlast", "expl") == ["explain"]
    assert complete("outlast", "run", "--max-r") == ["--max-restarts"]
    assert complete("outlast", "run", "--checkpoint") == ["--checkpoint-every"]
    assert complete("outlast", "run", "--spares", "1", "tra") == ["train.py"]
    assert complete("outlast", "fleet", "rep") == ["report"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(tmp_path: Path, shell: str) -> None:
    assert install(tmp_path, "--shell", shell).returncode == 0
    assert "nproc-per-node" in script_of(tmp_path).read_text()


def test_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    found = install(tmp_path, "--shell", "tcsh")
    assert found.returncode == 2 and "tcsh" in found.stderr
    unknown = install(tmp_path, SHELL="/bin/nonesuch")
    assert unknown.returncode == 1 and "specify --shell" in unknown.stderr
    assert not list(tmp_path.iterdir())
