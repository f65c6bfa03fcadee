"""Connections between the nodes of a group, without processes."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from outlast.events import Fault
from outlast.launch.torchrun import group_hosts
from outlast.launch.torchrun.group_hosts import BeatingLink, GroupHosts
from outlast.transport.node_link import NodeLink, RankFailed, RanksEnded, StartRanks, users_key
from outlast.transport.socket_stream import SocketStream

KEY = users_key("a secret of these tests")
FAILED = RankFailed(attempt=0, fault=Fault(kind="exited", detail="a failure"))


def connected() -> tuple[NodeLink, BeatingLink]:
    """Return both ends of a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    listener.close()
    beating = BeatingLink("n2", NodeLink(SocketStream(ours), KEY), 10.0, lambda: 0.0)
    return NodeLink(SocketStream(theirs), KEY), beating


@pytest.mark.parametrize("extra", [0, 1])
def test_a_peer_whose_messages_pile_up_is_lost(extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_hosts, "UNREAD_MAX", 8)

    async def play() -> None:
        peer, beating = connected()
        for _ in range(8 + extra):
            peer.send(FAILED)
        while extra and await peer.receive():  # until the connection has ended
            pass
        assert [await beating.receive() for _ in range(8)] == [FAILED] * 8
        peer.send(FAILED)
        assert await beating.receive() == (None if extra else FAILED)
        assert beating.end_reason.startswith("has sent 8 messages") == bool(extra)
        await beating.close()
        await peer.close()

    asyncio.run(asyncio.wait_for(play(), 10))


class EndlessRanks:
    """Ranks of this host, which neither fail nor end."""

    started_s = 0.0

    async def start(self, attempt: int, port: int) -> None:
        pass

    async def next_failure(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_node_that_leaves_is_a_failure_unless_its_ranks_have_ended(*, has_ended: bool) -> None:
    async def play() -> None:
        peer, beating = connected()
        ranks: Any = EndlessRanks()
        hosts = GroupHosts(ranks, None, "127.0.0.1", 1, [beating])
        await hosts.start(0)
        while not isinstance(await peer.receive(), StartRanks):
            pass
        failure = asyncio.create_task(hosts.next_failure())
        if has_ended:
            peer.send(RanksEnded(attempt=0))
            peer.send(FAILED)
            assert await failure == FAILED.fault  # the end of the ranks came before
            failure = asyncio.create_task(hosts.next_failure())
        hosts.release("n2", "SIGTERM")
        if not has_ended:
            assert [await failure] == hosts.losses()
        hosts.fail(FAILED.fault)
        assert await (failure if has_ended else hosts.next_failure()) == FAILED.fault
        assert [loss.host for loss in hosts.losses()] == ["n2"]
        hosts.close()
        await beating.close()
        await peer.close()

    asyncio.run(asyncio.wait_for(play(), 10))
