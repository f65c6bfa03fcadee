"""Round trips of message frames, and refusal of damaged ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import WireError
from outlast.events import Fault
from outlast.transport import channel, messages
from outlast.transport.rank_spans import RankSpan
from outlast.transport.rendezvous_messages import MeetEntry

TOKEN = b"k" * 32


def envelope(body: messages.AnyBody, seq: int = 1) -> messages.MessageEnvelope:
    return messages.MessageEnvelope(
        run="r", term=1, agent="a0", incarnation=1, worker="w1-0", seq=seq, body=body
    )


BODIES = [
    messages.WorkerHello(pid=3, fingerprint={"torch": "2"}, address="127.0.0.1:1"),
    messages.Status(
        generation=2, n=7, step=7, state="idle", fault=Fault(kind="killed", detail="x")
    ),
    messages.Joined(generation=3, sent={2: ("ab", 10, 0.5)}),
    messages.Seat(generation=2, seat=1, world=4, n=7, first=False, slots={"before:7": b"\0\1"}),
    messages.Connect(generation=1, n=0, transfers=((0, 2),), timeout_s=1.5),
    messages.Put(generation=1, key="k", value=b"a", ranks=(RankSpan(0, 4, 2),)),
    messages.HostMeets(
        generation=1,
        name="g",
        ranks=(RankSpan(0, 4, 2),),
        entries={2: MeetEntry(b"a", b"8" * 32, "a:1")},
    ),
    messages.Met(generation=1, name="g", values=(b"a",), addresses=("a:1",), parts={2: b"8" * 8}),
    messages.WorkerLostReport(
        worker="w", fault=Fault(kind="exited", detail="y"), n=3, state="running"
    ),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_a_frame_survives_the_wire(body: messages.AnyBody) -> None:
    frame = channel.encode_frame(envelope(body), TOKEN)
    assert list(channel.FrameDecoder(TOKEN).feed(frame)) == [envelope(body)]


@given(st.lists(st.integers(1, 400), max_size=60))
def test_any_split_of_the_stream_gives_the_same_frames(cuts: list[int]) -> None:
    sent = [envelope(body, seq) for seq, body in enumerate(BODIES, 1)]
    stream = b"".join(channel.encode_frame(e, TOKEN) for e in sent)
    decoder, got, at = channel.FrameDecoder(TOKEN), [], 0
    for cut in [*cuts, len(stream)]:
        got += decoder.feed(stream[at : at + cut])
        at += cut
    assert got == sent


@given(st.data())
def test_any_flipped_bit_is_refused(data: st.DataObject) -> None:
    frame = bytearray(channel.encode_frame(envelope(BODIES[0]), TOKEN))
    bit = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[bit // 8] ^= 1 << (bit % 8)
    # A flipped length may make the decoder wait for more; it must never deliver a frame.
    with contextlib.suppress(WireError):
        assert list(channel.FrameDecoder(TOKEN).feed(bytes(frame))) == []


def test_another_runs_token_is_refused() -> None:
    frame = channel.encode_frame(envelope(BODIES[0]), os.urandom(32))
    with pytest.raises(WireError, match="token"):
        list(channel.FrameDecoder(TOKEN).feed(frame))


def test_a_frame_above_the_limit_is_refused_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    big = envelope(messages.Put(generation=1, key="k", value=b"x" * 4096))
    frame = channel.encode_frame(big, TOKEN)
    monkeypatch.setattr(channel, "FRAME_BYTES_MAX", 1024)
    with pytest.raises(WireError, match="limit"):
        channel.encode_frame(big, TOKEN)
    with pytest.raises(WireError, match="announces"):
        list(channel.FrameDecoder(TOKEN).feed(frame))


def test_envelopes_of_one_turn_are_one_frame() -> None:
    ours, theirs = socket.socketpair()
    sent = [envelope(body, seq) for seq, body in enumerate(BODIES, 1)]

    async def talk() -> None:
        peer = channel.Channel(ours, TOKEN, lambda _: None, lambda _: None)
        assert all(peer.send(each) for each in sent)
        peer.close()

    asyncio.run(talk())
    with theirs:
        stream = theirs.recv(1 << 16)
    _, length, _ = channel.HEADER.unpack_from(stream)
    first, rest = stream[: (end := channel.HEADER.size + length)], stream[end:]
    assert list(channel.FrameDecoder(TOKEN).feed(first)) == sent[:1], "a frame of its own"
    _, length, _ = channel.HEADER.unpack_from(rest)
    assert len(rest) == channel.HEADER.size + length
    assert list(channel.FrameDecoder(TOKEN).feed(rest)) == sent[1:]


def test_a_frame_that_ends_inside_an_envelope_is_refused() -> None:
    cut = channel.encode_envelope(envelope(BODIES[0]))[:-1]
    with pytest.raises(WireError, match="cannot be read"):
        list(channel.FrameDecoder(TOKEN).feed(channel.pack_frame([cut], TOKEN)))


def test_frames_of_a_closed_peer_are_read_after_a_failed_send() -> None:
    """A worker reports why it ends, and ends; Close is sent to it before its report is read."""
    ours, theirs = socket.socketpair()
    received: list[messages.MessageEnvelope] = []
    reasons: list[str] = []

    async def talk() -> None:
        peer = channel.Channel(ours, TOKEN, received.append, reasons.append)
        theirs.sendall(channel.encode_frame(envelope(BODIES[0]), TOKEN))
        theirs.close()
        assert peer.send(envelope(BODIES[1]))  # queued for this turn's frame
        while not peer.closed:  # noqa: ASYNC110 - a few turns of the loop are enough
            await asyncio.sleep(0)
        assert not peer.send(envelope(BODIES[1]))

    asyncio.run(talk())
    assert received == [envelope(BODIES[0])]
    assert len(reasons) == 1
