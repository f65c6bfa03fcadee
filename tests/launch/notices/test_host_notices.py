"""Notices to a host: what its agent sends of signals, a watched file and a cloud."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.launch.notices.metadata_server import metadata_server

from outlast.errors import UsageError
from outlast.events import Warned
from outlast.launch import torchrun_arguments
from outlast.launch.notices import host_notices, notice_flags
from outlast.launch.notices.host_notices import HostNotices
from outlast.launch.notices.notice_flags import NoticeFlags
from outlast.transport import messages


class Host:
    """Notices of a host, and all that was sent and noted."""

    def __init__(self, **flags: object) -> None:
        self.sent: list[messages.NodeChecked] = []
        self.notes: list[str] = []
        self.news = asyncio.Event()
        made = NoticeFlags(**flags)  # type: ignore[arg-type]
        self.notices = HostNotices(made, self._say, self._note)

    def _say(self, body: messages.NodeChecked) -> None:
        self.sent.append(body)
        self.news.set()

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.news.set()

    def found(self) -> tuple[Warned, ...]:
        return self.sent[-1].found if self.sent else ()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def watch(self, steps: Callable[[], Awaitable[None]]) -> None:
        """Watch while `steps` is played."""

        async def play() -> None:
            watching = asyncio.create_task(self.notices.run())
            try:
                await steps()
            finally:
                watching.cancel()

        asyncio.run(play())


def test_of_a_signal_the_first_one_is_a_notice() -> None:
    host = Host(signals=("SIGTERM",), after_s=120.0)
    host.notices.report()
    assert host.sent == []
    assert not host.notices.take_signal("SIGUSR1", "w1-2")
    assert host.notices.take_signal("SIGTERM", "w1-2")
    assert not host.notices.take_signal("SIGTERM", "the launcher")
    (one,) = host.found()
    assert (one.check, one.code, one.severity) == ("signal", "SIGTERM", "drain")
    assert one.detail == "SIGTERM to w1-2" and 119 < one.within_s <= 120
    host.notices.report()
    assert len(host.sent) == 2 and host.found()[0].within_s <= one.within_s


def test_a_file_is_a_notice_from_its_appearance_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_notices, "FILE_S", 0.01)
    path = tmp_path / "leave"
    host = Host(file=str(path), after_s=30.0)

    async def steps() -> None:
        path.touch()
        await host.until(host.found)
        (one,) = host.found()
        assert one.check == "file" and 29 < one.within_s <= 30 and "no reason" in one.detail
        (tmp_path / "new").write_text("10min\nthe rack is moved")
        (tmp_path / "new").rename(path)
        await host.until(lambda: host.found()[0].within_s > 500)
        assert "the rack is moved" in host.found()[0].detail
        path.unlink()
        await host.until(lambda: not host.found())
        assert host.sent[-1].completed == ("file",), "it is taken back"

    host.watch(steps)
    assert host.notes == [] and len(host.sent) == 3, "only changes are sent"


@pytest.mark.parametrize("data", [b"soon\nplease", b"\xff\0\x1b[2J", b"x" * 100_000, b"2001-01-01"])
def test_a_file_with_any_other_content_is_a_notice_too(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "leave"
    path.write_bytes(data)
    host = Host(file=str(path), after_s=45.0)

    async def steps() -> None:
        await host.until(host.found)

    host.watch(steps)
    (one,) = host.found()
    assert 44 < one.within_s <= 45 and one.detail.isprintable() and len(one.detail) <= 500
    assert len(host.notes) == 1 and "45 s are assumed" in host.notes[0]


def test_a_cloud_that_is_away_keeps_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_notices, "CLOUD_S", 0.02)
    with metadata_server() as server:
        host = Host(cloud="aws", address=server.address)

        async def steps() -> None:
            server.spot(120)
            await host.until(host.found)
            server.status = 500
            await host.until(lambda: host.notes)
            assert host.found()[0].code == "spot terminate"
            server.status = 200
            server.answers.clear()
            await host.until(lambda: not host.found())

        host.watch(steps)
    (note,) = host.notes
    assert "status 500" in note


def test_a_deadline_that_counts_from_the_first_answer_does_not_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_notices, "CLOUD_S", 0.02)
    with metadata_server() as server:
        host = Host(cloud="gcp", address=server.address)

        async def steps() -> None:
            server.google("TRUE")
            loop = asyncio.get_running_loop()
            server.on_request = lambda: loop.call_soon_threadsafe(host.news.set)
            await host.until(lambda: len(server.requests) > 12)
            server.on_request = lambda: None

        host.watch(steps)
    assert len(host.sent) == 1


def parse(*flags: str, script: Path) -> NoticeFlags:
    return torchrun_arguments.parse([*flags, str(script)]).notices


def test_the_flags(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.touch()
    assert parse(script=script) == NoticeFlags()
    found = parse(
        "--notice-signal=term,SIGUSR1,USR1", "--notice-time=2min", "--notice-file=/x",
        "--notice-cloud=aws=http://127.0.0.1:80/", script=script,
    )  # fmt: skip
    assert found == NoticeFlags(
        signals=("SIGTERM", "SIGUSR1"), after_s=120, file="/x", cloud="aws", address="127.0.0.1:80"
    )
    assert notice_flags.numbers(found.signals) == (signal.SIGTERM, signal.SIGUSR1)
    for wrong in (
        "--notice-signal=KILL", "--notice-signal=", "--notice-time=0s", "--notice-time=soon",
        "--notice-cloud=ibm", "--notice-cloud=aws=https://x",
    ):  # fmt: skip
        with pytest.raises(UsageError, match="notice"):
            parse(wrong, script=script)
