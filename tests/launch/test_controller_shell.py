"""Controller shell: authentication of callers, and time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from outlast import events
from outlast.errors import GaveUpError, RunDirError
from outlast.launch import agent_listener
from outlast.launch import controller_shell as controllers
from outlast.launch.controller_shell import ControllerShell
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.run_display import DisplayRecord
from outlast.launch.run_journal import read_journal
from outlast.launch.start_point import CheckpointSearch
from outlast.telemetry.event_store import read_events
from outlast.telemetry.segment_files import SegmentWriter
from outlast.transport import channel, messages

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

SILENT = "signal.pause()"


class Caller:
    """Somebody at the controller's door."""

    def __init__(self, stage: Stage, controller: ControllerShell, token: bytes) -> None:
        self._stage = stage
        self.token = token
        self.sock = socket.create_connection(controller.address, timeout=10)
        self.sock.setblocking(False)
        self.run = controller.job.run
        self.decoder = channel.FrameDecoder(stage.token)
        self.frames: list[messages.MessageEnvelope] = []

    def say(self, body: messages.AnyBody, worker: str = "", seq: int = 1) -> None:
        envelope = messages.MessageEnvelope(
            run=self.run, term=1, agent="here", incarnation=1, worker=worker, seq=seq, body=body
        )
        self.sock.sendall(channel.encode_frame(envelope, self.token))

    def hello(self) -> None:
        self.say(messages.AgentHello(host="here", address="127.0.0.1", capacity=2, lease_s=5))

    async def turned_away(self) -> bool:
        """Whether the door is shut in our face."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(10):
                while data := await loop.sock_recv(self.sock, 65536):
                    self.frames += self.decoder.feed(data)
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    async def heard(self, kind: type[messages.Body]) -> bool:
        """Whether a frame of this kind comes."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            while not any(isinstance(frame.body, kind) for frame in self.frames):
                self.frames += self.decoder.feed(await loop.sock_recv(self.sock, 65536))
        return True

    def close(self) -> None:
        self.sock.close()


def at_the_door(
    stage: Stage, token: bytes, act: Callable[[Caller, ControllerShell], Awaitable[None]]
) -> None:
    async def scene(crew: WorkerPool, record: DisplayRecord) -> None:
        controller = ControllerShell(
            crew.plan, crew.run_dir, stage.token, record, None,
            CheckpointSearch(crew.run_dir.room("checkpoints"), crew.run_dir.job.run, (), ""),
        )  # fmt: skip
        controller.begin()
        caller = Caller(stage, controller, token)
        try:
            await act(caller, controller)
        finally:
            caller.close()
            controller.close()

    stage.play(stage.plan(stage.script(SILENT)), scene)


def notes(stage: Stage) -> str:
    found = read_events(stage.root / "run")
    return " ".join(event.text for event in found if isinstance(event, events.Note))


def test_a_wrong_token_is_refused_and_noted(stage: Stage) -> None:
    async def act(caller: Caller, _controller: ControllerShell) -> None:
        caller.hello()
        assert await caller.turned_away() and not caller.frames

    at_the_door(stage, b"forged", act)
    assert "does not carry this run's token" in notes(stage)


def test_the_right_token_is_served(stage: Stage) -> None:
    async def act(caller: Caller, _controller: ControllerShell) -> None:
        caller.hello()
        assert await caller.heard(messages.Spawn)

    at_the_door(stage, stage.token, act)


def test_another_run_is_refused(stage: Stage) -> None:
    async def act(caller: Caller, _controller: ControllerShell) -> None:
        caller.run = "another"
        caller.hello()
        assert await caller.turned_away() and not caller.frames

    at_the_door(stage, stage.token, act)
    assert "another" in notes(stage)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 2, b"OLW3" + b"\0" * 200])
def test_noise_is_refused(stage: Stage, data: bytes) -> None:
    async def act(caller: Caller, _controller: ControllerShell) -> None:
        caller.sock.sendall(data)
        assert await caller.turned_away()

    at_the_door(stage, stage.token, act)
    assert "refused" in notes(stage)


def test_a_stranger_cannot_fill_the_memory(stage: Stage) -> None:
    """A frame may announce 128 MiB, and its tag comes true only at its end."""

    async def act(caller: Caller, _controller: ControllerShell) -> None:
        caller.sock.sendall(channel.HEADER.pack(channel.MAGIC, 100 << 20, b"x" * 16))
        caller.sock.setblocking(True)
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe, as the kernel likes
            await asyncio.to_thread(lambda: [caller.sock.sendall(b"x" * 65536) for _ in range(99)])

    at_the_door(stage, stage.token, act)
    assert "no authentic frame" in notes(stage)


def test_the_silent_are_not_waited_for(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_listener, "STRANGER_S", 0.1)

    async def act(caller: Caller, _controller: ControllerShell) -> None:
        assert await caller.turned_away()

    at_the_door(stage, stage.token, act)
    assert "no message" in notes(stage)


@pytest.mark.parametrize("entry", [b"\x93\x01\x02\x03", b"\x81\xa4type\xa7PutKept"])
def test_a_journal_of_another_version_is_not_guessed_at(stage: Stage, entry: bytes) -> None:
    writer = SegmentWriter(stage.root / "journal", "term000001", durable=True)
    writer.append(entry)
    writer.close()
    with pytest.raises(RunDirError, match="cannot be read"):
        read_journal(stage.root / "journal", pytest.fail)


def test_a_journal_that_cannot_be_written_ends_the_run(stage: Stage) -> None:
    """No decision without its record: the disk is as good as full."""

    async def act(caller: Caller, controller: ControllerShell) -> None:
        directory = stage.root / "run" / "journal"
        directory.rmdir()
        caller.hello()
        await caller.heard(messages.Spawn)
        caller.say(messages.WorkerHello(pid=1, fingerprint={}, address="a:1"), "w1-0", 1)
        with pytest.raises(RunDirError, match="everything decided before is kept"):
            async with asyncio.timeout(10):
                await controller.ended

    at_the_door(stage, stage.token, act)


def test_a_mistake_in_the_core_is_told_and_ends_the_run(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_state: object, _event: object) -> None:
        raise AssertionError("two workers in seat 3")

    async def act(caller: Caller, controller: ControllerShell) -> None:
        monkeypatch.setattr(controllers, "apply_all", broken)
        caller.hello()
        with pytest.raises(GaveUpError, match="two workers in seat 3"):
            async with asyncio.timeout(10):
                await controller.ended
        told = (stage.root / "run" / "controller-error-1.log").read_text()
        assert "Traceback" in told and "two workers in seat 3" in told

    at_the_door(stage, stage.token, act)
