"""The meeting of nodes, over loopback: who takes part, and who is refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ConfigError, OutlastError
from outlast.launch.nodes import node_joining
from outlast.launch.nodes.node_facts import NodeIdentity
from outlast.launch.nodes.node_flags import NodeFlags
from outlast.launch.nodes.node_meeting import NodeMeeting, NodeSeat, RunPlace
from outlast.transport.node_link import (
    NodeAccepted,
    NodeBeat,
    NodeLink,
    run_token,
    users_key,
)

KEY = users_key("a secret of these tests")
PLACE = RunPlace("run1", 1, ("127.0.0.1", 7), "127.0.0.1", 8)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def join(*args: Any, **kwargs: Any) -> tuple[str, NodeAccepted]:
    """Take part in a meeting; return this host's address and its place, without the connection."""
    link, place = await node_joining.join(*args, **kwargs)
    await link.close()
    return link.address, place


class Hall:
    """A meeting of `nodes` nodes at a free port; its own host is "first"."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder
        self.endpoint = ("127.0.0.1", free_port())
        self.notes: list[str] = []
        self.meeting = NodeMeeting(
            self.identity("first", 0), folder, NodeFlags(nodes=nodes), self.notes.append
        )

    def identity(
        self, host: str, node_rank: int = -1, key: bytes = KEY, **facts: str
    ) -> NodeIdentity:
        return NodeIdentity(host, node_rank, self.endpoint, key, {"script": "train.py", **facts})

    async def join(self, host: str, node_rank: int = -1, **facts: str) -> tuple[str, NodeAccepted]:
        return await join(
            self.identity(host, node_rank, **facts), self.folder, 10, self.notes.append
        )

    async def together(
        self, *joins: Coroutine[Any, Any, tuple[str, NodeAccepted]]
    ) -> list[tuple[str, NodeAccepted]]:
        """Gather while nodes join; return their places."""
        joining = [asyncio.create_task(each) for each in joins]
        await self.meeting.accept(await self.meeting.gather(10), PLACE, b"nonce")
        return [await each for each in joining]


@in_a_loop
async def test_nodes_get_their_ranks_and_the_tokens_agree(tmp_path: Path) -> None:
    hall = Hall(tmp_path, 4)
    found = await hall.together(hall.join("c"), hall.join("b", 2), hall.join("a"))
    places = {name: place for name, (_, place) in zip("cba", found, strict=True)}
    assert {place.hosts for place in places.values()} == {("first", "a", "b", "c")}
    assert places["a"].address == ("127.0.0.1", 7)
    assert run_token(KEY, places["a"].run_nonce) == run_token(KEY, b"nonce") != KEY


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ({"host": "second", "script": "other.py"}, "its script is other.py, and that of the"),
        ({"host": "second", "extra": "1"}, "its extra is 1"),
        ({"host": "first"}, "a node of host first is there already"),
        ({"host": "second", "node_rank": 0}, "node rank 0 is taken by another host"),
        ({"host": "second", "node_rank": 2}, "its node rank 2 is not below 2"),
        ({"host": "second", "key": users_key("another secret")}, "the token is not that of"),
    ],
)
@in_a_loop
async def test_a_node_that_does_not_fit_is_told_why(
    tmp_path: Path, who: dict[str, Any], says: str
) -> None:
    hall = Hall(tmp_path)
    gathering = asyncio.create_task(hall.meeting.gather(10))
    with pytest.raises(ConfigError) as caught:
        await join(hall.identity(**who), tmp_path, 10, hall.notes.append)
    assert says in str(caught.value) and "nothing was started" in str(caught.value)
    assert any("refused" in note and "endpoint" in note for note in hall.notes)
    await _late(hall, gathering)


async def _late(hall: Hall, gathering: asyncio.Task[list[NodeSeat]]) -> tuple[str, NodeAccepted]:
    """Let the right node come after the wrong one."""
    joining = asyncio.create_task(hall.join("second"))
    await hall.meeting.accept(await gathering, PLACE, b"nonce")
    return await joining


@in_a_loop
async def test_every_node_learns_the_failure_domains_of_all(tmp_path: Path) -> None:
    """Any of them may hold the controller later."""
    hall = Hall(tmp_path, 2)
    identity = hall.identity("a")._replace(domain="row/rack2")
    joining = join(identity, tmp_path, 10, hall.notes.append)
    ((_, place),) = await hall.together(joining)
    assert dict(zip(place.hosts, place.domains, strict=True)) == {"first": "", "a": "row/rack2"}


@in_a_loop
async def test_a_run_directory_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    hall = Hall(tmp_path / "shared")
    gathering = asyncio.create_task(hall.meeting.gather(10))
    with pytest.raises(OutlastError, match="its run directory is not the one"):
        await join(hall.identity("second"), tmp_path, 10, hall.notes.append)
    gathering.cancel()
    await hall.meeting.refuse_all("over")


@in_a_loop
async def test_missing_nodes_end_the_meeting_by_name(tmp_path: Path) -> None:
    hall = Hall(tmp_path, 3)
    joining = asyncio.create_task(hall.join("second"))
    with pytest.raises(ConfigError, match=r"2 of 3 nodes came to the endpoint.*first, second"):
        await hall.meeting.gather(2)
    with pytest.raises(ConfigError, match="only 2 of 3 nodes came in time"):
        await joining


@in_a_loop
async def test_strangers_cost_nothing_and_nobody_is_kept_out(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    gathering = asyncio.create_task(hall.meeting.gather(30))
    strangers = []
    for _ in range(200):
        try:
            strangers.append(await asyncio.open_connection(*hall.endpoint))
        except OSError:
            await asyncio.sleep(0)
    for _, writer in strangers:
        writer.write(b"GET / HTTP/1.1\r\nHost: endpoint\r\n\r\n")
    for reader, writer in strangers:
        with contextlib.suppress(ConnectionError):
            await reader.read()  # each is closed by the meeting
        writer.close()
    await _late(hall, gathering)


@in_a_loop
async def test_an_endpoint_of_another_program_is_named(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
        await writer.drain()
        writer.close()

    hall = Hall(tmp_path)
    async with await asyncio.start_server(answer, *hall.endpoint):
        with pytest.raises(ConfigError, match="is another program's"):
            await hall.join("second")


@in_a_loop
async def test_an_endpoint_that_nobody_opens_is_named(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    with pytest.raises(ConfigError, match=r"gave no answer within 0\.5 s"):
        await join(hall.identity("second"), tmp_path, 0.5, hall.notes.append)
    assert sum("waiting for the endpoint" in note for note in hall.notes) == 1


@in_a_loop
async def test_a_name_that_never_resolves_is_named(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    hall.endpoint = ("no-such-host.invalid", 29400)
    hall.meeting = NodeMeeting(
        hall.identity("first", 0), tmp_path, NodeFlags(nodes=2), hall.notes.append
    )
    says = r"'no-such-host.invalid' of the endpoint does not resolve to an IPv4 address .* 0\.5 s"
    with pytest.raises(ConfigError, match=says):
        await hall.meeting.gather(0.5)
    with pytest.raises(ConfigError, match=says):
        await join(hall.identity("second"), tmp_path, 0.5, hall.notes.append)


@in_a_loop
async def test_nodes_use_the_address_that_they_are_given(tmp_path: Path) -> None:
    hall = Hall(tmp_path)
    first = hall.identity("first", 0)._replace(
        endpoint=("somewhere.invalid", hall.endpoint[1]), local_addr="127.0.0.2"
    )
    hall.meeting = NodeMeeting(first, tmp_path, NodeFlags(nodes=2), hall.notes.append)
    second = hall.identity("second")._replace(
        endpoint=("127.0.0.2", hall.endpoint[1]), local_addr="127.0.0.3"
    )
    joining = asyncio.create_task(join(second, tmp_path, 10, hall.notes.append))
    await hall.meeting.accept(await hall.meeting.gather(10), PLACE, b"nonce")
    address, _ = await joining
    assert (hall.meeting.address, address) == ("127.0.0.2", "127.0.0.3")
    await hall.meeting.refuse_all("over")
    lost = first._replace(local_addr="192.0.2.1")
    with pytest.raises(ConfigError, match="its address is not one of this host"):
        await NodeMeeting(lost, tmp_path, NodeFlags(nodes=2), hall.notes.append).gather(10)


@in_a_loop
async def test_what_a_node_has_sent_is_of_no_use_to_who_sends_it_again(tmp_path: Path) -> None:
    hall = Hall(tmp_path, 3)
    gathering = asyncio.create_task(hall.meeting.gather(20))
    record = bytearray()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection(*hall.endpoint)

        async def copy(
            source: asyncio.StreamReader, target: asyncio.StreamWriter, keep: bytearray
        ) -> None:
            while data := await source.read(1 << 16):
                keep += data
                target.write(data)
            target.close()

        await asyncio.gather(copy(reader, to_writer, record), copy(to_reader, writer, bytearray()))

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        identity = hall.identity("second")._replace(endpoint=proxy.sockets[0].getsockname()[:2])
        second = asyncio.create_task(join(identity, tmp_path, 20, hall.notes.append))
        async with asyncio.timeout(10):
            while "second" not in hall.meeting._seats:  # noqa: ASYNC110 - ends in a few turns
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(*hall.endpoint)
            writer.write(record)
            await reader.read()
            writer.close()
        assert "its Hello is not of this connection" in hall.notes[-1]
        third = asyncio.create_task(hall.join("third"))
        await hall.meeting.accept(await gathering, PLACE, b"nonce")
        await asyncio.gather(second, third)


@in_a_loop
async def test_a_meeting_opens_again_for_nodes_in_place_of_lost_ones(tmp_path: Path) -> None:
    hall = Hall(tmp_path, 4)
    meeting, theirs, links = hall.meeting, dict[str, NodeLink](), list[NodeLink]()

    async def enter(host: str, node_rank: int = -1) -> NodeLink:
        identity = hall.identity(host, node_rank)
        link, place = await node_joining.join(identity, tmp_path, 10, hall.notes.append)
        assert place.hosts.index(host) == expected[host]
        return link

    async def met(seats: Coroutine[Any, Any, list[NodeSeat]]) -> list[str]:
        accepted = await meeting.accept(await seats, PLACE, b"nonce", keep=True)
        theirs.update(accepted)
        links.extend(link for _, link in accepted)
        return [host for host, _ in accepted]

    expected = {"c": 1, "b": 2, "a": 3}
    names = [asyncio.create_task(enter(*one)) for one in (("c", 1), ("b", 2), ("a",))]
    assert await met(meeting.gather(10)) == ["c", "b", "a"]
    links += (ours := [await each for each in names])
    expected = {"a": 3, "d": 1}  # a host has its rank again, another one that of the lost host
    gathering = asyncio.create_task(met(meeting.gather_again(["a", "c"], 10)))
    for wrong, why in ((("b",), "host b is there already"), (("e", 2), "rank 2 is taken")):
        with pytest.raises(ConfigError, match=why):
            await hall.join(*wrong)
    again = [asyncio.create_task(enter(*one)) for one in (("d",), ("a",))]
    assert await gathering == ["d", "a"]
    links += [await each for each in again]
    with pytest.raises(ConfigError, match=r"3 of 4 nodes came.*a, b, first; wait longer"):
        await meeting.gather_again(["d"], 0.2)
    ours[1].send(NodeBeat(still_s=0.0))  # of b, who takes part in it from its start on
    assert await theirs["b"].receive() == NodeBeat(still_s=0.0)
    for link in links:
        await link.close()
