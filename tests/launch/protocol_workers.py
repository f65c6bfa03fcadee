"""Real launchers with workers that follow the protocol without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from outlast import events
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

# A worker that keeps to the protocol without torch: it ends when a file says so, or when drained.
ACTOR = """
import select, socket
from outlast.transport import channel, messages
from outlast.config import worker_settings
from outlast.transport.worker_page import Page
settings = worker_settings()
token = bytes.fromhex(settings.token)
sock = socket.socket(fileno=settings.control_fd)
page = Page(settings.page_fd)
decoder, seq, seat = channel.FrameDecoder(token), 0, settings.seat
def say(body):
    global seq
    seq += 1
    sock.sendall(channel.encode_frame(messages.MessageEnvelope(run=settings.run, term=settings.term,
        agent="", incarnation=1, worker=settings.worker, seq=seq, body=body), token))
def act(body):
    global seat, opened
    match body:
        case messages.Seat():
            seat = body.seat
            say(messages.WorkerReady(generation=body.generation, n=body.n))
        case messages.Connect():
            same = ("digest", 1, 0.0)
            say(messages.Joined(generation=body.generation,
                sent={joiner: same for donor, joiner in body.transfers if donor == seat},
                received={donor: same for donor, joiner in body.transfers if joiner == seat}))
        case messages.Open():
            # One phase was completed at once: whoever dies now has been past its first step.
            page.put("before", 1, b"state")
            page.beat(1, 1, "idle", 0, time.monotonic_ns(), time.monotonic_ns(), 0.5)
            opened = True
            tell(f"open{body.generation}-{seat}")
            if body.ask == "drain":
                tell(f"drain{seat}")
                if DRAINS:
                    say(messages.Finished(n=1))
        case messages.Close():
            say(messages.Status(generation=body.generation, n=1, step=1, state="idle"))
        case messages.Decide():
            say(messages.WorkerReady(generation=body.generation, n=body.n))
        case messages.Stop():
            sys.exit(0)
say(messages.WorkerHello(pid=os.getpid(), fingerprint={}, address="127.0.0.1:1"))
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
        say(messages.Finished(n=1))
"""


def actor(drains: bool = True, family: bool = False) -> str:
    return f"DRAINS, FAMILY = {drains}, {family}\n{ACTOR}"


class Theatre:
    """Launchers of one test, started as from a shell and killed at its end."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.run_dir = stage.root / "run"
        self._launchers: list[subprocess.Popen[str]] = []

    def start(self, script: Path, *flags: str) -> subprocess.Popen[str]:
        launcher = self.stage.launch(script, *flags)
        self._launchers.append(launcher)
        return launcher

    def end(self, launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = launcher.communicate(timeout=120)
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
    """Return the text without frame and line ends of the terminal's width."""
    return " ".join(text.replace("│", " ").split())


def events_of(theatre: Theatre, kind: type[events.Event]) -> list[events.Event]:
    return [event for event in read_events(theatre.run_dir) if isinstance(event, kind)]
