"""A run of one: answers what a controller would, so that `python script.py` needs no launcher."""

from __future__ import annotations

from collections.abc import Callable

from outlast import wire


class LocalControl:
    """Speaks the protocol for a world of one, in the process itself."""

    def __init__(self, on_body: Callable[[wire.AnyBody], None]) -> None:
        self._on_body = on_body
        self._address = ""

    def send(self, body: wire.WorkerBody) -> None:
        match body:
            case wire.Hello():
                self._address = body.address
                self._on_body(wire.Seat(generation=1, seat=0, world=1, n=0, first=True))
            case wire.Ready():
                self._on_body(
                    wire.Connect(
                        generation=body.generation, n=body.n, seats=("alone",),
                        addresses=(self._address,), transfers=(), timeout_s=30.0,
                    )
                )  # fmt: skip
            case wire.Joined():
                self._on_body(wire.Open(generation=body.generation, n=0))
            case wire.SharedAsk():
                self._on_body(wire.SharedMake(name=body.name))
            case wire.SharedMade():
                self._on_body(wire.SharedIs(name=body.name, value=body.value))
            case wire.Finished():
                self._on_body(wire.Stop(ok=True, reason="done"))
            case _:
                pass

    try_send = send

    def close(self) -> None:
        pass
