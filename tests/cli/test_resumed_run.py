"""`outlast run --resume`, the newest run, and the report of a run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

OUTLAST = [sys.executable, "-m", "outlast"]
SCRIPT = Path(__file__).parents[2] / "examples" / "ported_ddp.py"
FLAGS = ["--plain", "--nproc-per-node=2", "--checkpoint-every=50"]


def digest(output: str) -> str:
    return re.findall(r"parameters sha256 ([0-9a-f]{64})", output)[-1]


@pytest.mark.process
def test_a_run_that_was_interrupted_goes_on_by_the_command_that_it_printed(tmp_path: Path) -> None:
    """From another directory, and without its flags; the weights are those of a whole run."""
    started = [*OUTLAST, "run", *FLAGS, str(SCRIPT), "--epochs=8"]
    place = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        started,
        cwd=tmp_path,
        env=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        assert first.stdout is not None
        shown = ""
        while "epoch 2" not in shown:
            shown += first.stdout.readline()
        first.send_signal(signal.SIGINT)
        shown += first.stdout.read()
    assert first.returncode == EXIT_INTERRUPTED, shown
    watch = re.search(r"watch it with: outlast (top .*)", shown)
    assert watch is not None
    resume = re.search(r"resume with: outlast (run --resume [^│]+?)\s*│", shown)
    assert resume is not None, shown
    command = shlex.split(resume[1])
    second = subprocess.run(
        [*OUTLAST, *command, "--plain"], cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    assert second.returncode == EXIT_DONE, second.stdout + second.stderr
    assert "resumed at step" in second.stdout
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    whole = subprocess.run(started, cwd=elsewhere, capture_output=True, text=True, timeout=150)
    assert digest(second.stdout) == digest(whole.stdout)


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        (["--resume"], "runs/ holds none", EXIT_USAGE),
        (
            ["--plain", "--resume=missing", "--json"],
            "the command of this run is unknown",
            EXIT_USER_ERROR,
        ),
        (["--resume", "missing", "--spares=1"], "--spares=1 cannot follow --resume", EXIT_USAGE),
        (["--resume", "missing", "train.py"], "train.py cannot follow --resume", EXIT_USAGE),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    message: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", *argv]) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_newest_run_is_taken_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["summary"]) == EXIT_USAGE
    assert "no run directory was given" in capsys.readouterr().err
    for number, name in enumerate(("later", "older")):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        SyntheticRun(run_dir, world=2, spares=1).start().steps(3).killed(1).steps(2).end()
        (run_dir / "run.json").write_text("{}")
        os.utime(run_dir / "run.json", (1e9, 1e9 - number))
    for command in ("explain", "events", "summary"):
        assert main([command, "last"]) == EXIT_DONE
        assert "the newest run: runs/later" in capsys.readouterr().err
    assert main(["report"]) == EXIT_DONE
    assert sorted(path.name for path in Path("runs/later").glob("report.*")) == [
        "report.html",
        "report.svg",
    ]
    assert main(["report", "--out", "missing"]) == EXIT_USER_ERROR


MAKES_A_TABLE = """
import os, signal, sys
from pathlib import Path
import torch
import outlast
session = outlast.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.protect(model=model, optimizer=optimizer)
class Table:
    def __init__(self):
        self.rows = [1.0, 2.0]
class Box:
    pass
box = Box()
def train_step():
    if not hasattr(box, "table"):
        box.table = Table()
    if session.step_index >= 5:
        box.table.rows[0] += 0.5
    optimizer.zero_grad()
    (model(torch.ones(1, 2)) * box.table.rows[0]).square().mean().backward()
    optimizer.step()
for _ in session.batches(None, until=12):
    if session.step_index == 10 and not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os.kill(int(os.environ["LAUNCHER"]), signal.SIGKILL)
        signal.pause()
    session.run(train_step)
print("end", box.table.rows, model.weight.tolist(), flush=True)
"""


@pytest.mark.extended
@pytest.mark.process
def test_a_resumed_run_has_what_the_first_step_made_and_later_ones_changed(tmp_path: Path) -> None:
    script, ends = tmp_path / "train.py", list[str]()
    script.write_text(MAKES_A_TABLE)
    (tmp_path / "done").touch()
    for mark in ("done", "stopped"):
        run_dir = tmp_path / f"run-{mark}"
        flags = ["--plain", "--nproc-per-node=1", "--checkpoint-every=4", f"--run-dir={run_dir}"]
        command = shlex.join([*OUTLAST, "run", *flags, str(script), str(tmp_path / mark)])
        started = ["sh", "-c", f"LAUNCHER=$$ exec {command}"]
        run = subprocess.run(started, capture_output=True, text=True, timeout=100)
        if mark == "stopped":
            assert run.returncode == -signal.SIGKILL, run.stdout + run.stderr
            run = subprocess.run(
                [*OUTLAST, "run", "--resume", str(run_dir), "--plain"],
                capture_output=True, text=True, timeout=100,
            )  # fmt: skip
            assert "resumed at step 8" in run.stderr
        assert run.returncode == EXIT_DONE, run.stdout + run.stderr
        ends += re.findall(r"end \[.*", run.stdout)
    assert ends[0] == ends[1]
    assert ends[0].startswith("end [4.5, 2.0]")
