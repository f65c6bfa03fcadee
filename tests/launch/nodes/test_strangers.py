"""Strangers at the meeting's endpoint and the controller's listener, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.conftest import wait_for
from tests.launch.nodes.test_node_meeting import PLACE, Hall, in_a_loop, join

from outlast.launch.nodes.endpoint_listener import HELLO_BYTES_MAX, STRANGERS_MAX
from outlast.transport import node_link, stranger_table

FLOOD = 10_000
SENT = {
    "nothing": b"",
    "garbage": os.urandom(64),
    "http": b"GET / HTTP/1.1\r\nHost: endpoint\r\n\r\n",
    "an old version": node_link.HEADER.pack(b"OLN0", 4, b"t" * 16) + b"\x80\x80\x80\x80",
    "a large frame": struct.pack(">4sI16s", node_link.MAGIC, HELLO_BYTES_MAX + 1, b"t" * 16),
    "half a header": node_link.MAGIC + b"\0",
    "a wrong token": node_link.HEADER.pack(node_link.MAGIC, 1, b"t" * 16) + b"\x80",
}
# Connects as often as it is told, from an address of its own, and sends the same each time; keeps
# the newest 500 connections open.
FLOODER = """
import socket, sys
port, count, data = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
kept, made = [], 0
while made < count:
    try:
        one = socket.create_connection(("127.0.0.1", port), 5, (sys.argv[4], 0))
        made += 1
        one.sendall(data)
    except OSError:
        continue
    kept.append(one)
    if len(kept) > 500:
        kept.pop(0).close()
    if made == 200:
        print("many", flush=True)
print("all", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def flood(
    port: int, data: bytes = b"", count: int = FLOOD, source: str = "127.0.0.2"
) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", FLOODER, str(port), str(count), data.hex(), source]
    flooder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield flooder
    finally:
        flooder.kill()
        flooder.communicate()


def rss_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def line(flooder: subprocess.Popen[str]) -> str:
    assert flooder.stdout is not None
    return flooder.stdout.readline()


@pytest.mark.process
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("127.0.0.2", id="elsewhere", marks=pytest.mark.extended),
        pytest.param("127.0.0.1", id="same address"),
    ],
)
@in_a_loop
async def test_a_node_gets_in_during_a_flood(tmp_path: Path, source: str) -> None:
    hall = Hall(tmp_path, 3)
    gathering = asyncio.create_task(hall.meeting.gather(100))
    await hall_opens(hall)
    with flood(hall.endpoint[1], source=source) as flooder:
        assert await asyncio.to_thread(line, flooder) == "many\n"
        before_bytes = rss_bytes()
        second = asyncio.create_task(
            join(hall.identity("second"), tmp_path, 100, hall.notes.append)
        )
        assert await asyncio.to_thread(line, flooder) == "all\n"
        assert rss_bytes() - before_bytes < 16 << 20
        assert "second" in hall.meeting._seats, "it is in before the flood ends"
        third = asyncio.create_task(join(hall.identity("third"), tmp_path, 100, hall.notes.append))
        await hall.meeting.accept(await gathering, PLACE, b"nonce")
        await asyncio.gather(second, third)
    strangers = hall.meeting.listener.strangers
    assert len(strangers) <= STRANGERS_MAX and strangers.refused >= FLOOD - STRANGERS_MAX
    refusals = [note for note in hall.notes if "refused" in note]
    assert 1 <= len(refusals) < 60, "a note each NOTE_S, not each connection"
    await hall.meeting.refuse_all("over")


async def hall_opens(hall: Hall) -> None:
    """Wait until the endpoint is open."""
    await asyncio.to_thread(wait_for, lambda: bool(hall.meeting.address), "the endpoint")


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
@in_a_loop
async def test_whatever_a_stranger_sends_is_refused_and_counted(
    tmp_path: Path, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.launch.nodes.endpoint_listener.HELLO_S", 0.3)
    hall = Hall(tmp_path)
    gathering = asyncio.create_task(hall.meeting.gather(100))
    await hall_opens(hall)
    reader, writer = await asyncio.open_connection(*hall.endpoint)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert (hall.meeting.listener.strangers.refused, len(hall.meeting.listener.strangers)) == (1, 0)
    assert [note for note in hall.notes if "a connection to the endpoint was refused" in note]
    gathering.cancel()
    await hall.meeting.refuse_all("over")


@in_a_loop
async def test_a_frame_that_comes_byte_by_byte_ends_with_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.launch.nodes.endpoint_listener.HELLO_S", 0.5)
    hall = Hall(tmp_path)
    gathering = asyncio.create_task(hall.meeting.gather(100))
    await hall_opens(hall)
    sock = socket.create_connection(hall.endpoint)

    def drip() -> None:
        with sock, contextlib.suppress(OSError):
            while True:  # the meeting ends the connection
                sock.sendall(node_link.MAGIC[:1])
                sock.settimeout(0.05)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1):
                        return

    head = struct.pack(">4sI16s", node_link.MAGIC, HELLO_BYTES_MAX, b"t" * 16)
    sock.sendall(head)
    await asyncio.wait_for(asyncio.to_thread(drip), 20)
    assert hall.meeting.listener.strangers.refused == 1
    gathering.cancel()
    await hall.meeting.refuse_all("over")


@in_a_loop
async def test_the_address_with_most_connections_loses_its_oldest_first() -> None:
    notes: list[str] = []
    closed: list[str] = []
    table = stranger_table.StrangerTable("the test", 3, 60.0, notes.append)

    def stranger(name: str, address: str) -> stranger_table.Stranger:
        def close(reason: str) -> None:
            closed.append(name)
            table.refuse(one, reason)

        one = stranger_table.Stranger(address, close)
        return one

    for name, address in (("a1", "a"), ("b1", "b"), ("b2", "b"), ("b3", "b"), ("b4", "b")):
        table.add(stranger(name, address))
    assert closed == ["b1", "b2"] and (table.refused, len(table)) == (2, 3)
    assert len(notes) == 1 and "it sent nothing, and others wait (3 at most)" in notes[0]
    table.close("over")
    assert len(table) == 0
    assert len(notes) == 2 and "it sent nothing, and others wait (3 at most)" in notes[1]


@pytest.mark.extended
@pytest.mark.process
def test_a_flood_of_the_controllers_listener_disturbs_no_run(tmp_path: Path) -> None:
    job = Path(__file__).parents[2] / "cluster" / "steady_job.py"

    def run(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir()
        words = ["--plain", "--nproc-per-node=2", "--fault=kill:rank=1,step=60"]
        words += [f"--run-dir={folder / 'run'}", str(job), str(folder / "out"), "100"]
        command = [sys.executable, "-m", "outlast", "run", *words]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def results(folder: Path) -> list[str]:
        return [path.read_text() for path in sorted((folder / "out").iterdir())]

    undisturbed = run(tmp_path / "one")
    output, _ = undisturbed.communicate(timeout=100)
    assert undisturbed.returncode == 0, output
    flooded = run(tmp_path / "two")
    ports: list[int] = []

    def listens() -> bool:
        ports[:] = listening_ports(flooded.pid)
        return bool(ports)

    wait_for(listens, "the controller's listener")
    with flood(ports[0], os.urandom(8)) as flooder:
        output, _ = flooded.communicate(timeout=200)
        assert flooder.poll() is None
    assert flooded.returncode == 0, output
    assert results(tmp_path / "two") == results(tmp_path / "one")
    assert "to the controller were refused" in output


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens, of its own sockets."""
    own = set()
    with contextlib.suppress(OSError):
        own = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1][-4:], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
