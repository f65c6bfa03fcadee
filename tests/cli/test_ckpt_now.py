"""`outlast ckpt now` against a real launcher, and its other answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.ckpt_command import Ckpt

from outlast.errors import EXIT_USER_ERROR
from outlast.launch import run_directory

pytestmark = pytest.mark.process
JOB = Path(__file__).parents[1] / "end_to_end" / "jobs" / "training_job.py"
PATIENCE_S = 60.0
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from outlast import events
from outlast.launch import run_directory as rundir
from outlast.telemetry.event_store import EventWriter

path, answer = Path(sys.argv[1]), sys.argv[2]
run_dir = rundir.take(path, "train.py", (), 1)
writer = EventWriter(path / "events", "launcher")

def say(event, **fields):
    writer.emit(event(t_ns=time.time_ns(), **fields))

def done(n, kind="step"):
    say(events.PhaseDone, worker="w", seat=0, generation=1, n=n, step=n, kind=kind,
        t_begin_ns=1, t_vote_ns=1)

def saved(n):
    say(events.CheckpointSaved, n=n, step=n, path=f"step {n}", size_bytes=1, seconds=0.1)

def asked(*_):
    if answer == "saves":
        saved(4)  # was on its way, and lacks a step that was done
        say(events.CheckpointFailed, n=4, step=4, path="p", error="an old one")
        saved(5)
    elif answer == "rolls back":
        say(events.GenerationOpened, incident=1, generation=2, n=2)
        saved(2)
    elif answer == "fails":
        say(events.CheckpointFailed, n=6, step=6, path="p", error="No space left on device")
    elif answer == "refuses":
        say(events.Note, worker="", seat=-1, text=rundir.SAVE_REFUSED)
    elif answer == "ends":
        say(events.RunEnded, outcome="interrupted", exit_code=4, n=5, step=5)
    elif answer == "dies":
        os._exit(1)

done(5)
done(6, kind="checkpoint")
if answer != "takes none":
    signal.signal(rundir.SAVE_SIGNAL, asked)
    run_dir.tell_saves(True)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Starts one that answers in one way; its run directory."""
    started: list[subprocess.Popen[bytes]] = []

    def start(answer: str) -> Path:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path), answer]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return tmp_path

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.parametrize(("answer", "n"), [("saves", 5), ("rolls back", 2)])
def test_the_first_checkpoint_with_all_that_was_done(
    answer: str, n: int, ckpt: Ckpt, launcher: Callable[[str], Path]
) -> None:
    found = ckpt("now", launcher(answer), "--json")
    assert found.code == 0 and found.json["n"] == n


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("fails", "the checkpoint of step 6 failed: No space left on device"),
        ("refuses", "has not called outlast.init()"),
        ("ends", "the run ended (interrupted, step 5)"),
        ("dies", "has died before it could save"),
        ("is silent", "the request remains in force"),
        ("takes none", "accepts no requests"),
    ],
)
def test_any_other_answer(
    answer: str, says: str, ckpt: Ckpt, launcher: Callable[[str], Path]
) -> None:
    run_dir = launcher(answer)
    found = ckpt("now", run_dir, "--timeout", 0.3 if answer == "is silent" else PATIENCE_S)
    assert (found.code, found.out) == (EXIT_USER_ERROR, "")
    assert says in found.err
    if answer == "takes none":  # and was not sent what would have killed it
        assert run_directory.holder(run_dir) is not None


def test_now_without_a_live_launcher_is_an_error(ckpt: Ckpt, tmp_path: Path) -> None:
    found = ckpt("now", tmp_path)
    assert found.code == EXIT_USER_ERROR and "is no run directory" in found.err
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait(30)
    for words in (f"{process.pid} 1 saves", f"{os.getpid()} 1 saves", "", "x y saves", "7"):
        (tmp_path / "lock").write_text(f"{words}\n")  # pytest's own pid, of another start
        found = ckpt("now", tmp_path)
        assert found.code == EXIT_USER_ERROR and "does not run on this host" in found.err


def test_the_lock_records_its_holder_and_readiness(tmp_path: Path) -> None:
    run_dir = run_directory.take(tmp_path, "train.py", (), 1)
    for saves in (False, True, False):
        run_dir.tell_saves(saves)
        holder = run_directory.holder(tmp_path)
        assert holder is not None and (holder.pid, holder.saves) == (os.getpid(), saves)
    run_dir.release()
    assert run_directory.SAVE_SIGNAL == signal.SIGUSR1
    with run_directory.ignore_save_signal():  # a launcher that starts, or ends
        os.kill(os.getpid(), run_directory.SAVE_SIGNAL)
    assert signal.getsignal(run_directory.SAVE_SIGNAL) is signal.SIG_DFL


def eventually(condition: Callable[[], Any], what: str) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"{what}: not within {PATIENCE_S} s")


def test_a_real_run_saves_and_goes_on(ckpt: Ckpt, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="`outlast run` needs torch")
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    command = [
        *(sys.executable, "-m", "outlast", "run", "--plain", "--nproc-per-node=2"),
        *(f"--run-dir={run_dir}", str(JOB), f"--out={tmp_path / 'out'}", f"--hold={hold}"),
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: all((tmp_path / f"hold.{rank}").exists() for rank in (0, 1)), "step 8")
        threading.Timer(0.5, hold.touch).start()  # the request comes first, most often
        found = ckpt("now", run_dir, "--timeout", PATIENCE_S, "--json")
        assert found.code == 0, found.err + (tmp_path / "log").read_text()
        assert found.json["step"] >= 7 and found.json["size_bytes"] > 0
        assert ckpt("verify", found.json["path"]).code == 0
        shown = ckpt("show", run_dir, "--step", found.json["step"], "--json").json
        assert len(shown["shards"]) == 2 and shown["values"]["optimizer"].startswith("AdamW")
        assert process.wait(PATIENCE_S) == 0  # it went on to its end
    finally:
        process.kill()
        process.wait(10)
    found = ckpt("now", run_dir)
    assert found.code == EXIT_USER_ERROR and "does not run on this host" in found.err
