"""Control of a run of one process, without a launcher."""

from __future__ import annotations

from collections.abc import Callable

from outlast.transport import messages


class StandaloneControl:
    """Speaks the protocol for a world of one, in the process itself."""

    def __init__(self, on_body: Callable[[messages.AnyBody], None]) -> None:
        self._on_body = on_body
        self._address = ""

    def send(self, body: messages.WorkerBody) -> None:
        """Answer a message as a controller would."""
        match body:
            case messages.WorkerHello():
                self._address = body.address
                self._on_body(messages.Seat(generation=1, seat=0, world=1, n=0, first=True))
            case messages.WorkerReady():
                self._on_body(
                    messages.Connect(
                        generation=body.generation, n=body.n, seats=("alone",),
                        addresses=(self._address,), transfers=(), timeout_s=30.0,
                    )
                )  # fmt: skip
            case messages.Joined():
                self._on_body(messages.Open(generation=body.generation, n=0))
            case messages.SharedValueRequest():
                self._on_body(messages.SharedValueMake(name=body.name))
            case messages.SharedValueMade():
                self._on_body(messages.SharedValueReply(name=body.name, value=body.value))
            case messages.Finished():
                self._on_body(messages.Stop(ok=True, reason="done"))
            case _:
                pass

    try_send = send

    def close(self) -> None:
        """Do nothing: there is no connection."""
