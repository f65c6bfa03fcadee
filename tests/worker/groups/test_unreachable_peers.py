"""Searches for peers that do not connect, and attempts to connect that nobody answers."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from outlast.transport.connection_errors import silent_hosts
from outlast.worker.groups.gloo_device import GlooDevice

WITHIN_S = 0.5


@pytest.fixture
def silent() -> Iterator[str]:
    """A listener on another address that answers no connection: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        fillers = [_connect(listener.getsockname()) for _ in range(3)]
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        for filler in fillers:
            filler.close()


def _connect(address: tuple[str, int]) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(address)
    return one


def test_only_a_host_that_answers_nothing_is_unreachable(silent: str) -> None:
    device = GlooDevice("")
    with socket.socket() as listener:
        listener.bind(("127.0.0.3", 0))
        listener.listen()
        host, port = listener.getsockname()
        peers = {silent, f"{host}:{port}", "127.0.0.4:9", device.address, "127.0.0.1:9"}
        assert device.unreachable(peers, WITHIN_S, lambda: False) == {silent}


def test_a_search_ends_with_its_generation(silent: str) -> None:
    is_over = threading.Event()
    threading.Timer(0.1, is_over.set).start()
    began = time.monotonic()
    assert GlooDevice("").unreachable({silent}, 30.0, is_over.is_set) == set()
    assert time.monotonic() - began < 10.0


def test_attempts_that_nobody_answers_are_ended(silent: str) -> None:
    host, _, port = silent.rpartition(":")
    device = GlooDevice("")
    with _connect((host, int(port))) as attempt:
        poll = select.poll()
        poll.register(attempt, select.POLLOUT)
        device.end_attempts({"127.0.0.2:1"})
        assert not poll.poll(50)
        device.end_attempts({silent})
        assert poll.poll(1000)


def test_gloos_words_name_the_silent_host() -> None:
    text = "[/pytorch/gloo/transport/tcp/pair.cc:537] Read error [10.78.0.2]:31648: {}. This is"
    for why in ("Connection timed out", "No route to host"):
        assert silent_hosts(text.format(why)) == {"10.78.0.2"}
    assert silent_hosts(text.format("Connection reset by peer")) == set()
    assert silent_hosts(text.format("Connection timed out").replace("10.78.0.2", "fd00::7")) == {
        "fd00::7"
    }
