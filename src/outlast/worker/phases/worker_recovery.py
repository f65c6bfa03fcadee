"""Recovery of a worker between Close and Open: connect, move state, adopt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from outlast.config import Limits
from outlast.controller.fault_spec import Where
from outlast.errors import EXIT_GAVE_UP, CodecError, CorruptionError, GroupError
from outlast.events import Fault, FaultKind
from outlast.transport import messages
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases import state_transfer
from outlast.worker.phases.state_transfer import Ticket
from outlast.worker.worker_status import WorkerStatus


class WorkerRecovery:
    """Follows the controller from one generation to the next, on the main thread.

    `replicated` is asked for when this worker is a donor, `adopt` when it has received, `opened`
    when a generation opens; `settled` are the functions that this worker has rehearsed, `learn`
    hears of everybody's.
    """

    def __init__(
        self,
        moment: WorkerStatus,
        groups: GroupRegistry,
        send: Callable[[messages.WorkerBody], None],
        limits: Limits,
        *,
        replicated: Callable[[], Any],
        adopt: Callable[[Any], None],
        opened: Callable[[], None],
        settled: Callable[[], set[str]],
        learn: Callable[[Iterable[str]], None],
        tick: Callable[[Where], None],
        now_ns: Callable[[], int],
    ) -> None:
        self._moment, self._groups, self._send = moment, groups, send
        self._replicated, self._adopt = replicated, adopt
        self._opened, self._tick, self._now_ns = opened, tick, now_ns
        self._settled, self._learn = settled, learn
        # The controller has deadlines for each part; this one only bounds a controller that is
        # itself gone without the agent noticing.
        self.patience_s = 2 * (limits.ready_s + limits.status_s + limits.transfer_s)
        self._decided: messages.Decide | None = None
        self.staged: Any = None  # the job's state at n, until the walk to n is over
        self.seat = -1

    def verdict(self) -> str:
        """Wait, with a yes cast and its answer lost, for the decision: "commit" or "redo"."""
        while True:
            body = self._moment.take(self.patience_s)
            if isinstance(body, messages.Decide):
                self._note(body)
                return "commit" if body.n > self._moment.n else "redo"
            self._stop(body)

    def heal(self) -> None:
        """Return when a generation is open and this worker stands in it before phase n+1."""
        moment = self._moment
        moment.enter("healing")
        self._tick("heal")
        self.take_over()
        self._groups.reap()
        if self._decided is not None or moment.opened == 0:
            self._ready()
        while True:
            body = moment.take(self.patience_s)
            match body:
                case messages.Decide():
                    self._note(body)
                    self._ready()
                case messages.Connect() if body.generation > moment.closed:
                    self._connect(body)
                case messages.Open() if body.generation > moment.closed:
                    self._open(body)
                    return
                case _:
                    self._stop(body)

    def take_over(self) -> None:
        """Be where the staged state is, once a generation with it was open. More than once,
        because the script's code between walked phases is run again (a scheduler's step)."""
        if self.staged is not None and self._moment.opened:
            self._adopt(self.staged)

    def linger(self) -> None:
        """After the script's end: stay a possible donor until the run is over."""
        while True:
            if not self._moment.is_open:
                self.heal()
                self._moment.enter("finished")
            body = self._moment.take(float(1 << 30) / 1000)
            if isinstance(body, messages.Stop):
                return
            if isinstance(body, messages.Decide):
                self._note(body)

    def _note(self, body: messages.Decide) -> None:
        self._decided = body
        self._moment.generation = max(self._moment.generation, body.generation)

    def _ready(self) -> None:
        self._send(messages.WorkerReady(generation=self._moment.generation, n=self._moment.n))

    def _connect(self, body: messages.Connect) -> None:
        moment = self._moment
        moment.generation = max(moment.generation, body.generation)
        sent: dict[int, Ticket] = {}
        received: dict[int, Ticket] = {}
        try:
            self._groups.connect(body.generation, body.addresses, body.timeout_s)
            self._compare_rehearsals()
            for donor, joiner in body.transfers:
                if self.seat == donor:
                    sent[joiner] = state_transfer.send(
                        self._groups, joiner, self._replicated(), lambda: self._tick("transfer")
                    )
                elif self.seat == joiner:
                    self.staged, received[donor] = state_transfer.receive(
                        self._groups, donor, lambda: self._tick("receive")
                    )
        except (GroupError, CorruptionError, CodecError) as error:
            kind: FaultKind = "transfer" if isinstance(error, CorruptionError) else "transport"
            if isinstance(error, CodecError):
                kind = "contract"  # no donor could ever write it
            moment.trouble(
                Fault(
                    kind=kind, detail=str(error), seat=self.seat, n=moment.n,
                    step=moment.step + 1, state=moment.state, t_ns=self._now_ns(),
                )
            )  # fmt: skip
            return
        self._send(messages.Joined(generation=body.generation, sent=sent, received=received))

    def _compare_rehearsals(self) -> None:
        # A function that any rank has rehearsed, all have: a rank that has not (its predecessor
        # died just before) would rehearse alone, while the others wait in its collectives.
        mine = msgspec.msgpack.encode(sorted(self._settled()))
        for answers in self._groups.gather_bytes(mine):
            self._learn(msgspec.msgpack.decode(answers, type=list[str]))

    def _open(self, body: messages.Open) -> None:
        if self.staged is not None:
            self._adopt(self.staged)
        self._opened()
        self._decided = None
        self._moment.joining = False
        self._moment.ask = body.ask
        self._moment.opened = body.generation

    def _stop(self, body: messages.ControllerBody) -> None:
        if isinstance(body, messages.Stop):
            raise SystemExit(0 if body.ok else EXIT_GAVE_UP)
