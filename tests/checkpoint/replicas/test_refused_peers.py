"""Refused offers and connections between keepers, and bounded waits."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest
from tests.checkpoint.keeper_orders import TIMEOUT_S, manifest_of, until
from tests.checkpoint.replicas.faulty_network import Network
from tests.checkpoint.replicas.paired_keepers import LARGE_BYTES, TOKEN, Seat, paired

from outlast.checkpoint.keeper.arena import Arena
from outlast.checkpoint.keeper.keeper_frames import Outcome, PeerKeeper, SaveOrder
from outlast.checkpoint.keeper.keeper_launch import address_of, open_door
from outlast.checkpoint.replicas import keeper_links
from outlast.checkpoint.replicas.keeper_links import COPY_S, Join, KeeperLink, Kept, Offer, Ready
from outlast.checkpoint.replicas.replica_receiver import ReplicaReceiver
from outlast.checkpoint.replicas.replica_sender import LANES, ReplicaSender, SentVersion
from outlast.errors import WireError

pytestmark = pytest.mark.process


@pytest.fixture
def pair() -> Iterator[tuple[Seat, Seat]]:
    network = Network("")
    with paired(network) as pair:
        yield pair
    network.close()


def test_unauthenticated_peers_are_refused(pair: tuple[Seat, Seat]) -> None:
    first, second = pair
    address = address_of(second.door)
    due = time.monotonic() + TIMEOUT_S
    with pytest.raises((WireError, OSError)):
        KeeperLink.open(address, "another token", due)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"\xff" * 100):
        with socket.create_connection(address.split(":"), TIMEOUT_S) as sock:  # pyright: ignore[reportArgumentType] - a port may be a word
            answer = bytearray()
            # A peer that closes with bytes unread resets the connection, at any point of this.
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                sock.sendall(said)
                with contextlib.suppress(OSError):  # reset already: not connected any more
                    sock.shutdown(socket.SHUT_WR)
                while received := sock.recv(4096):
                    answer += received
        assert len(answer) <= 36 and bytes(answer[:4]) in (b"", keeper_links.MAGIC)
    door = open_door()
    with door, pytest.raises(TimeoutError):  # nobody answers
        KeeperLink.open(address_of(door), TOKEN, time.monotonic() + 0.2)
    assert first.save(1).copies == 1


OFFER = Offer(copy="a", lanes=1, rank=0, size_bytes=4096, chunk_bytes=4096, arena_bytes=4096)


OFFERS = [
    (
        msgspec.structs.replace(OFFER, arena_bytes=1 << 55),
        "not enough memory for an arena of 36029 TB",
    ),
    (msgspec.structs.replace(OFFER, size_bytes=1 << 40), "contradicts itself"),
    (msgspec.structs.replace(OFFER, chunk_bytes=1), "contradicts itself"),
    (msgspec.structs.replace(OFFER, lanes=99), "contradicts itself"),
]


def test_offers_that_are_refused(pair: tuple[Seat, Seat]) -> None:
    for offer, error in OFFERS:
        link = KeeperLink.open(address_of(pair[1].door), TOKEN, time.monotonic() + TIMEOUT_S)
        link.send(offer)
        answer = link.receive()
        link.close()
        assert isinstance(answer, Kept) and error in answer.error
    lost = KeeperLink.open(address_of(pair[1].door), TOKEN, time.monotonic() + TIMEOUT_S)
    lost.send(Join(copy="unheard of", lane=1))
    with pytest.raises(ConnectionResetError):
        lost.receive()
    lost.close()
    assert pair[0].save(1).copies == 1


def test_a_sender_does_not_wait_for_what_another_left(pair: tuple[Seat, Seat]) -> None:
    """The same rank's, whose host went away without a word."""
    offers = [msgspec.structs.replace(OFFER, copy=name) for name in "ab"]
    links = [KeeperLink.open(address_of(pair[1].door), TOKEN, time.monotonic() + 5) for _ in offers]
    for link, offer in zip(links, offers, strict=True):
        link.send(offer)
        assert link.receive() == Ready()
    with pytest.raises(ConnectionResetError):
        links[0].receive()
    for link in links:
        link.close()


class Hall:
    """A sender in this process, which tells here what became of versions."""

    def __init__(self, *addresses: str) -> None:
        self.told: list[Outcome] = []
        self.arena = Arena.create(LARGE_BYTES)
        self.arena.stamp = 1
        found = tuple(PeerKeeper(name="a peer", address=address) for address in addresses)
        self.sender = ReplicaSender(found, TOKEN)

    def add(self, step: int) -> None:
        manifest = manifest_of(step, size_bytes=LARGE_BYTES)
        order = SaveOrder(
            save=step, arena=0, root="", manifest=manifest, deadline_s=1, to_disk=False
        )
        self.sender.add(SentVersion(order, self.arena, 1, self.told.append, lambda _: None))

    def hears(self, count: int) -> dict[int, Outcome]:
        until(lambda: len(self.told) >= count, f"{count} outcomes")
        return {told.save: told for told in self.told}

    def close(self) -> None:
        self.sender.stop()
        self.arena.close()


def test_a_peer_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And costs another one nothing; what it had not begun with is passed over for the newest."""
    monkeypatch.setattr(keeper_links, "STALL_S", 0.5)
    quick, stalled = open_door(), open_door()
    receiver = ReplicaReceiver(TOKEN)
    for door in (quick, stalled):
        door.setblocking(True)
    network = Network(address_of(stalled))
    network.pause_after(LARGE_BYTES // 2)
    one, both = Hall(network.here), Hall(network.here, address_of(quick))
    one.add(1)
    for _ in range(LANES):
        receiver.accept(stalled.accept()[0])
    assert network.paused.wait(TIMEOUT_S)
    monkeypatch.setattr(keeper_links, "HELLO_S", 0.5)
    begun = time.monotonic()
    for step in (2, 3):
        one.add(step)
    both.add(4)
    for _ in range(LANES):
        receiver.accept(quick.accept()[0])
    told = one.hears(3)
    assert [told[step].copies for step in (1, 2, 3)] == [0, 0, 0]
    assert told[2].error == "" and "timed out" in told[1].error and told[3].error
    assert both.hears(1)[4].copies == 1 and "127.0.0.1" in both.told[0].error
    assert time.monotonic() - begun < COPY_S / 3
    for opened in (network, quick, stalled, one, both):
        opened.close()
