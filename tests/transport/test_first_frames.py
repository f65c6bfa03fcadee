"""First frame of a connection: small, whatever else its sender has to say at once."""

from __future__ import annotations

import asyncio
import socket

from outlast.transport import messages
from outlast.transport.channel import STRANGER_BYTES_MAX, Channel

TOKEN = b"a token of this test"


def envelope(body: messages.AnyBody, seq: int) -> messages.MessageEnvelope:
    return messages.MessageEnvelope(
        run="r", term=1, agent="n1", incarnation=1, worker="", seq=seq, body=body
    )


def test_a_stranger_may_send_much_behind_its_first_message() -> None:
    """An agent that meets a new controller repeats reports of dead workers, with their state."""
    lost = messages.WorkerLostReport(
        worker="w1-0",
        fault=messages.Fault(kind="killed", detail=""),
        n=3,
        state="running",
        slots={"after:3": b"x" * 2 * STRANGER_BYTES_MAX},
    )
    hello = messages.AgentHello(host="n1", address="127.0.0.1", capacity=2, lease_s=5)

    async def act() -> None:
        received: list[messages.AnyBody] = []
        closed: list[str] = []
        both_or_none = asyncio.Event()

        def on_frame(frame: messages.MessageEnvelope) -> None:
            received.append(frame.body)
            if len(received) == 2:
                both_or_none.set()

        def on_closed(reason: str) -> None:
            closed.append(reason)
            both_or_none.set()

        ends = socket.socketpair()
        agent = Channel(ends[0], TOKEN, on_frame, on_closed)
        listener = Channel(ends[1], TOKEN, on_frame, on_closed, stranger=True)
        agent.send(envelope(hello, 1))
        agent.send(envelope(lost, 2))
        async with asyncio.timeout(30):
            await both_or_none.wait()
        assert received == [hello, lost] and closed == []
        agent.close()
        listener.close()

    asyncio.run(act())
