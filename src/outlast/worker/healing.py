"""What a worker does between Close and Open: wait for the decision, connect, move state, adopt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outlast import wire
from outlast.config import Limits
from outlast.core.faults import Where
from outlast.errors import EXIT_GAVE_UP, CorruptionError, GroupError
from outlast.events import Fault
from outlast.worker import transfer
from outlast.worker.groups import Groups
from outlast.worker.moment import Moment
from outlast.worker.transfer import Ticket


class Healer:
    """Follows the controller from one generation to the next, on the main thread.

    `replicated` is asked for when this worker is a donor, `adopt` when it has received, `opened`
    when a generation opens.
    """

    def __init__(
        self,
        moment: Moment,
        groups: Groups,
        send: Callable[[wire.WorkerBody], None],
        limits: Limits,
        *,
        replicated: Callable[[], Any],
        adopt: Callable[[Any], None],
        opened: Callable[[], None],
        tick: Callable[[Where], None],
    ) -> None:
        self._moment, self._groups, self._send = moment, groups, send
        self._replicated, self._adopt = replicated, adopt
        self._opened, self._tick = opened, tick
        # The controller has deadlines for each part; this one only bounds a controller that is
        # itself gone without the agent noticing.
        self.patience_s = 2 * (limits.join_s + limits.status_s + limits.transfer_s)
        self._decided: wire.Decide | None = None
        self._staged: Any = None
        self.seat = -1

    def verdict(self) -> str:
        """Wait, with a yes cast and its answer lost, for the decision: "commit" or "redo"."""
        while True:
            body = self._moment.take(self.patience_s)
            if isinstance(body, wire.Decide):
                self._note(body)
                return "commit" if body.n > self._moment.n else "redo"
            self._stop(body)

    def heal(self) -> None:
        """Return when a generation is open and this worker stands in it before phase n+1."""
        moment = self._moment
        moment.enter("healing")
        self._tick("heal")
        self._groups.reap()
        if self._decided is not None or moment.opened == 0:
            self._ready()
        while True:
            body = moment.take(self.patience_s)
            match body:
                case wire.Decide():
                    self._note(body)
                    self._ready()
                case wire.Connect() if body.generation > moment.closed:
                    self._connect(body)
                case wire.Open() if body.generation > moment.closed:
                    self._open(body)
                    return
                case _:
                    self._stop(body)

    def linger(self) -> None:
        """After the script's end: stay a possible donor until the run is over."""
        while True:
            if not self._moment.is_open:
                self.heal()
                self._moment.enter("finished")
            body = self._moment.take(float(1 << 30) / 1000)
            if isinstance(body, wire.Stop):
                return
            if isinstance(body, wire.Decide):
                self._note(body)

    def _note(self, body: wire.Decide) -> None:
        self._decided = body
        self._moment.generation = max(self._moment.generation, body.generation)

    def _ready(self) -> None:
        self._send(wire.Ready(generation=self._moment.generation, n=self._moment.n))

    def _connect(self, body: wire.Connect) -> None:
        moment = self._moment
        moment.generation = max(moment.generation, body.generation)
        sent: dict[int, Ticket] = {}
        received: dict[int, Ticket] = {}
        try:
            self._groups.connect(body.generation, body.addresses, body.timeout_s)
            for donor, joiner in body.transfers:
                if self.seat == donor:
                    sent[joiner] = transfer.send(
                        self._groups, joiner, self._replicated(), lambda: self._tick("transfer")
                    )
                elif self.seat == joiner:
                    self._staged, received[donor] = transfer.receive(
                        self._groups, donor, lambda: self._tick("receive")
                    )
        except (GroupError, CorruptionError) as error:
            kind = "transfer" if isinstance(error, CorruptionError) else "transport"
            moment.trouble(
                Fault(
                    kind=kind, detail=str(error), seat=self.seat, n=moment.n, step=moment.step,
                    t_ns=time.time_ns(),
                )
            )  # fmt: skip
            return
        self._send(wire.Joined(generation=body.generation, sent=sent, received=received))

    def _open(self, body: wire.Open) -> None:
        if self._staged is not None:
            self._adopt(self._staged)
            self._staged = None
        self._opened()
        self._decided = None
        self._moment.joining = False
        self._moment.draining = body.drain
        self._moment.opened = body.generation

    def _stop(self, body: wire.ControllerBody) -> None:
        if isinstance(body, wire.Stop):
            raise SystemExit(0 if body.ok else EXIT_GAVE_UP)
