"""Delivery to servers that hang, drip, refuse, close, redirect and answer errors."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from tests.launch.notify.webhook_server import DEADLINE_S, WebhookServer, serving

from outlast.launch.notify import notify_sender
from outlast.launch.notify.notify_sender import AttemptPacing, NotifySender
from outlast.launch.notify.notify_targets import read_target

QUICK = AttemptPacing(within_s=0.5, waits_s=(0.01, 0.01))


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    with serving() as server:
        yield server


def sender(url: str, attempts: AttemptPacing = QUICK) -> NotifySender:
    return NotifySender(read_target(f"{url}/hook bearer=env:T", {"T": "t0ken"}), attempts)


def close(one: NotifySender, within_s: float = DEADLINE_S) -> str:
    one.begin_close()
    return one.close(time.monotonic() + within_s)


def test_messages_arrive_in_order_and_the_last_one_first(server: WebhookServer) -> None:
    server.answers = ["hang"]
    one = sender(server.url, AttemptPacing(within_s=DEADLINE_S))
    one.put([b"0"])
    server.wait(1)
    one.put([b"1"])
    one.put([b"2"])
    one.put([b"3", b"4"], is_last=True)
    server.ends.set()  # closes without an answer: sent again
    assert close(one) == ""
    assert server.bodies == [0, 0, 3, 4, 1, 2]
    assert server.headers["Authorization"] == "Bearer t0ken" and server.paths[0] == "/hook"
    assert server.headers["Host"] == server.url.removeprefix("http://")


@pytest.mark.parametrize("first", [500, 503, 408, 429, "close", "hang", "drip"])
def test_what_may_pass_is_tried_again(server: WebhookServer, first: int | str) -> None:
    server.answers = [first]
    one = sender(server.url)
    one.put([b"1"])
    assert server.wait(2) == [1, 1]
    assert close(one) == "" and one.news() == ""


@pytest.mark.parametrize(
    ("answers", "requests", "why"),
    [
        ([500] * 3, 3, "answered 500"),
        ([404], 1, "answered 404"),
        ([307], 1, "answered 307"),
        (["hang"] * 3, 3, "no answer within 0.5 s"),
        (["drip"] * 3, 3, "no answer within 0.5 s"),
        (["close"] * 3, 3, "Remote end closed"),
    ],
)
def test_a_lost_message_is_reported_once(
    server: WebhookServer, answers: list[int | str], requests: int, why: str
) -> None:
    server.answers = [*answers, *answers]
    one = sender(server.url)
    one.put([b"1"])
    one.put([b"2"])
    one.put([b"3"])
    text = close(one)
    assert len(server.bodies) == 2 * requests + 1 and server.paths == ["/hook"] * len(server.paths)
    assert why in text and "in all: 2 messages" in text and "t0ken" not in text


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    one = sender(f"http://127.0.0.1:{port}")
    one.put([b"1"])
    assert "Connection refused" in close(one)


def test_a_full_queue_drops_the_oldest(
    server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify_sender, "QUEUED_MAX", 3)
    server.answers = ["hang"]
    one = sender(server.url, AttemptPacing(within_s=DEADLINE_S))
    one.put([b"0"])
    server.wait(1)
    for number in range(1, 6):
        one.put([b"%d" % number])
    one.put([b"9"], is_last=True)
    server.ends.set()
    assert "the queue was full; not sent in all: 3 messages" in close(one)
    assert server.bodies == [0, 0, 9, 4, 5]


def test_closing_waits_no_longer_than_its_deadline(server: WebhookServer) -> None:
    server.answers = ["hang"]
    one = sender(server.url, AttemptPacing(within_s=DEADLINE_S))
    one.put([b"1"])
    one.put([b"2"])
    server.wait(1)
    begin_s = time.monotonic()
    assert "not sent in all: 2 messages" in close(one, 0.2)
    assert time.monotonic() - begin_s < DEADLINE_S / 2


def test_a_proxy_of_the_environment_is_used(
    server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    one = sender("http://hook.invalid")
    one.put([b"1"])
    assert close(one) == "" and server.paths == ["http://hook.invalid/hook"]
