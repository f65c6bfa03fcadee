"""`outlast top` of runs that end, die, or name hostile workers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR
from outlast.telemetry.run_summary import summarise

COMMAND = [sys.executable, "-m", "outlast", "top"]


def test_the_figures_are_those_of_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SyntheticRun(tmp_path, world=4, spares=1).start().steps(5).killed(2).steps(5).end()
    assert main(["top", str(tmp_path), "--json"]) == EXIT_DONE
    state = json.loads(capsys.readouterr().out)
    main(["summary", str(tmp_path), "--json"])
    assert state["summary"] == json.loads(capsys.readouterr().out)
    assert main(["top", str(tmp_path)]) == EXIT_DONE
    text = capsys.readouterr().out
    assert [each["question"] in text for each in state["answers"]] == [True] * 5
    assert f"ETTR {100 * (summarise(tmp_path).ettr or 0):.1f} %" in text
    assert "\x1b" not in text


def test_workers_that_live_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SyntheticRun(tmp_path, world=20, spares=1, host="evil\x1b]0;x\x07").start().steps(2)
    run.killed(2)
    run.close()
    assert main(["top", str(tmp_path), "--once"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "4 more workers" in text and "1 worker lost before" in text
    assert "evil\\x1b]0;x\\x07" in text and "\x1b" not in text


@pytest.mark.process
@pytest.mark.parametrize("ends", [True, False])
def test_a_terminal_follows_a_run(tmp_path: Path, *, ends: bool) -> None:
    """To its end; Ctrl-C ends the view before."""
    run = SyntheticRun(tmp_path, world=2, spares=0).start().steps(3)
    run.close()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ours, theirs = pty.openpty()
        command = [*COMMAND, str(tmp_path)]
        environment = {**os.environ, "TERM": "xterm"}
        with subprocess.Popen(command, stdout=theirs, env=environment) as process:
            os.close(theirs)
            shown = b""
            while b"When is it done?" not in shown:
                shown += os.read(ours, 1 << 16)
            if ends:
                run.steps(4).end()
            else:
                process.send_signal(signal.SIGINT)
            with suppress(OSError):  # EIO: the process has ended
                while part := os.read(ours, 1 << 16):
                    shown += part
        os.close(ours)
    assert process.returncode == EXIT_DONE
    assert b"step 3" in shown and b"Traceback" not in shown
    assert (b"exit code 0" in shown) is ends


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) == EXIT_USER_ERROR
    assert "holds no events of a run" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert main(["top", str(tmp_path), "--price-per-hour=-1"]) == EXIT_USAGE
