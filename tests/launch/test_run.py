"""`outlast run` as a person runs it: real launchers, real signals, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from outlast import events
from outlast.observe.store import read_events

if TYPE_CHECKING:
    from conftest import Stage

pytestmark = pytest.mark.process
# A worker that keeps to the protocol without torch: it ends when a file says so, or when drained.
ACTOR = """
import select, socket
from outlast import wire
from outlast.config import worker_settings
from outlast.page import Page
settings = worker_settings()
token = bytes.fromhex(settings.token)
sock = socket.socket(fileno=settings.control_fd)
page = Page(settings.page_fd)
decoder, seq, seat = wire.Decoder(token), 0, settings.seat
def say(body):
    global seq
    seq += 1
    sock.sendall(wire.encode(wire.Envelope(run=settings.run, term=settings.term, agent="",
        incarnation=1, worker=settings.worker, seq=seq, body=body), token))
def act(body):
    global seat, opened
    match body:
        case wire.Seat():
            seat = body.seat
            say(wire.Ready(generation=body.generation, n=body.n))
        case wire.Connect():
            same = ("digest", 1, 0.0)
            say(wire.Joined(generation=body.generation,
                sent={joiner: same for donor, joiner in body.transfers if donor == seat},
                received={donor: same for donor, joiner in body.transfers if joiner == seat}))
        case wire.Open():
            # One phase was completed at once: whoever dies now has been past its first step.
            page.put("before", 1, b"state")
            page.beat(1, 1, "idle", 0, time.monotonic_ns(), time.monotonic_ns(), 0.5)
            opened = True
            tell(f"open{body.generation}-{seat}")
            if body.drain:
                tell(f"drain{seat}")
                if DRAINS:
                    say(wire.Finished(n=1))
        case wire.Close():
            say(wire.Status(generation=body.generation, n=1, step=1, state="idle"))
        case wire.Decide():
            say(wire.Ready(generation=body.generation, n=body.n))
        case wire.Stop():
            sys.exit(0)
say(wire.Hello(pid=os.getpid(), fingerprint={}, address="127.0.0.1:1"))
if seat < 0:
    tell("spare")
if FAMILY:
    in_child(f"child{seat}", os.setsid)
    daemon(f"daemon{seat}")
done = opened = False
while True:
    if select.select([sock], [], [], 0.02)[0]:
        for envelope in decoder.feed(sock.recv(65536) or sys.exit(9)):
            act(envelope.body)
    if opened and not done and os.path.exists(f"{ROOT}/finish"):
        done = True
        say(wire.Finished(n=1))
"""


def actor(drains: bool = True, family: bool = False) -> str:
    return f"DRAINS, FAMILY = {drains}, {family}\n{ACTOR}"


class Theatre:
    """Launchers of one test: started as from a shell, none of them survives the test."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.run_dir = stage.root / "run"
        self._launchers: list[subprocess.Popen[str]] = []

    def start(self, script: Path, *flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "outlast", "run", "--run-dir", str(self.run_dir)]
        launcher = subprocess.Popen(
            [*command, *flags, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        )
        self._launchers.append(launcher)
        return launcher

    def end(self, launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = launcher.communicate(timeout=60)
        return launcher.returncode, out, err

    def go(self, script: Path, *flags: str) -> tuple[int, str, str]:
        return self.end(self.start(script, *flags))

    def told(self, name: str) -> int:
        self.stage.eventually(lambda: self.stage.pid_in(name), f"{name} has been told")
        return self.stage.pid_in(name)

    def close(self) -> None:
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait(10)
            for stream in (launcher.stdout, launcher.stderr):
                _close(stream)


def _close(stream: IO[str] | None) -> None:
    if stream:
        stream.close()


@pytest.fixture
def theatre(stage: Stage) -> Iterator[Theatre]:
    theatre = Theatre(stage)
    yield theatre
    theatre.close()


def words(text: str) -> str:
    """Without the frame and the line ends that a terminal's width brings."""
    return " ".join(text.replace("│", " ").split())


def events_of(theatre: Theatre, kind: type[events.Event]) -> list[events.Event]:
    return [event for event in read_events(theatre.run_dir) if isinstance(event, kind)]


# --- scripts of ours ----------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_the_run_ends(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script, "--nproc-per-node", "2", "--spares", "1", "--json")
    pid = theatre.told("open1-1")
    theatre.told("spare")
    os.kill(pid, signal.SIGKILL)
    assert theatre.told("open2-1") not in (0, pid)
    (theatre.stage.root / "finish").write_text("")
    code, out, err = theatre.end(launcher)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["outcome"] == "done" and len(summary["incidents"]) == 1
    assert summary == json.loads((theatre.run_dir / "summary.json").read_text())
    assert (theatre.run_dir / "logs/1/w1-2").is_symlink()


def test_a_stopped_worker_is_found_out_and_replaced(theatre: Theatre) -> None:
    limits = ("--limit", "hang_floor_s=0.5", "--limit", "hang_ceiling_s=1")
    launcher = theatre.start(theatre.stage.script(actor()), "--nproc-per-node", "2", *limits)
    pid = theatre.told("open1-0")
    theatre.told("open1-1")
    os.kill(pid, signal.SIGSTOP)
    assert theatre.told("open2-0") not in (0, pid)
    assert not theatre.stage.alive(pid)
    (theatre.stage.root / "finish").write_text("")
    code, _, err = theatre.end(launcher)
    assert code == 0 and "rank 0 was stopped" in err


def test_interrupted_then_resumed(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script, "--nproc-per-node", "2")
    theatre.told("open1-0")
    theatre.told("open1-1")
    launcher.send_signal(signal.SIGTERM)
    code, _, err = theatre.end(launcher)
    assert code == 4 and "SIGTERM" in err
    (theatre.stage.root / "finish").write_text("")
    assert theatre.go(script, "--nproc-per-node", "2")[0] == 0
    terms = events_of(theatre, events.RunStarted)
    assert [event.term for event in terms if isinstance(event, events.RunStarted)] == [1, 2]


def test_a_second_interrupt_does_not_wait_for_anybody(theatre: Theatre) -> None:
    launcher = theatre.start(theatre.stage.script(actor(drains=False)), "--limit", "stop_s=50")
    pid = theatre.told("open1-0")
    launcher.send_signal(signal.SIGINT)
    theatre.told("drain0")
    launcher.send_signal(signal.SIGINT)
    code, _, err = theatre.end(launcher)
    assert code == 4 and "everything is killed" in err and not theatre.stage.alive(pid)


def test_a_drain_that_takes_too_long_is_ended(theatre: Theatre) -> None:
    launcher = theatre.start(theatre.stage.script(actor(drains=False)), "--limit", "stop_s=0.3")
    pid = theatre.told("open1-0")
    launcher.send_signal(signal.SIGHUP)
    assert theatre.end(launcher)[0] == 4 and not theatre.stage.alive(pid)


def test_nobody_survives_a_killed_launcher_and_its_run_resumes(theatre: Theatre) -> None:
    script = theatre.stage.script(actor(family=True))
    launcher = theatre.start(script, "--nproc-per-node", "2")
    names = [f"{who}{rank}" for who in ("open1-", "child", "daemon") for rank in (0, 1)]
    pids = [theatre.told(name) for name in names]
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.wait(10)
    (theatre.stage.root / "finish").write_text("")
    # The next launcher waits for the warden of the last one, and needs no pause of ours.
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code == 0, err
    assert [pid for pid in pids if theatre.stage.alive(pid)] == []


def test_nobody_survives_a_killed_process_group(theatre: Theatre) -> None:
    launcher = theatre.start(theatre.stage.script(actor(family=True)))
    pids = [theatre.told(name) for name in ("open1-0", "child0", "daemon0")]
    os.killpg(launcher.pid, signal.SIGKILL)
    theatre.stage.eventually(lambda: not any(map(theatre.stage.alive, pids)), "all are dead")


def test_a_run_directory_in_use_or_of_another_job(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script)
    theatre.told("open1-0")
    code, _, err = theatre.go(script)
    assert code != 0 and f"in use by pid {launcher.pid}" in words(err)
    (theatre.stage.root / "finish").write_text("")
    assert theatre.end(launcher)[0] == 0
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code != 0 and "another job" in words(err)


# --- scripts that never call init() -------------------------------------------------------------


def test_plain_success(theatre: Theatre) -> None:
    text = "print('rank', os.environ['RANK'], sys.argv[1:])\nprint('oh', file=sys.stderr)"
    script = theatre.stage.script(text)
    code, out, _ = theatre.go(script, "--nproc-per-node", "2", "--spares", "1")
    assert code == 0
    assert "[0]: rank 0 []" in out and "[1]: rank 1 []" in out and "[0]: oh" in out
    assert "never called outlast.init()" in words(out)
    assert not (theatre.run_dir / "logs/spare").exists()


def test_plain_failure_is_told_once_and_stops_the_others(theatre: Theatre) -> None:
    text = """
if os.environ["RANK"] == "1":
    raise RuntimeError("no such luck")
tell("other")
signal.pause()
"""
    code, _, err = theatre.go(theatre.stage.script(text), "--nproc-per-node", "2")
    assert code == 1
    framed = err.split("-" * 72)[1]
    assert "rank 1" in framed and framed.count("RuntimeError: no such luck") == 1


def test_plain_restarts_on_a_fresh_port(theatre: Theatre) -> None:
    text = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "port", os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    sys.exit(5 if attempt < 2 else 0)
while attempt < 2:
    signal.pause()
"""
    script = theatre.stage.script(text)
    code, _, err = theatre.go(script, "--nproc-per-node", "2", "--max-restarts", "2")
    assert code == 0 and "restart 2 of 2" in err
    logs = sorted((theatre.run_dir / "logs/0").glob("*/stdout.log"))
    said = [path.read_text().split() for path in logs]
    assert sorted(words[1] for words in said) == ["0", "1", "2"]
    assert len({words[3] for words in said}) > 1


def test_plain_restarts_are_limited(theatre: Theatre) -> None:
    code, _, err = theatre.go(theatre.stage.script("sys.exit(5)"), "--max-restarts", "1")
    assert code == 1 and "exit code 5" in err
    assert len(list((theatre.run_dir / "logs/0").iterdir())) == 2


def test_a_plain_script_can_say_goodbye(theatre: Theatre) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: (tell("goodbye"), sys.exit(0)))
tell("ready")
while True:
    signal.pause()
"""
    launcher = theatre.start(theatre.stage.script(text))
    theatre.told("ready")
    launcher.send_signal(signal.SIGINT)
    code, _, _ = theatre.end(launcher)
    assert code == 4 and theatre.stage.pid_in("goodbye")


def test_some_with_init_and_some_without(theatre: Theatre) -> None:
    text = """
if os.environ["RANK"] == "0":
    tell("first")
    sys.exit(0)
while not os.path.exists(f"{ROOT}/first"):
    time.sleep(0.01)
while os.path.exists("/proc/" + open(f"{ROOT}/first").read()):
    time.sleep(0.01)
"""
    script = theatre.stage.script(text + actor())
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code == 1 and "all ranks must call it, or none" in err


def test_wrong_use_starts_nothing(theatre: Theatre) -> None:
    script = theatre.stage.script("tell('started')")
    code, _, err = theatre.go(script, "--nnodes", "2")
    assert code == 2 and "one node" in err
    assert not theatre.run_dir.exists() and not theatre.stage.pid_in("started")
