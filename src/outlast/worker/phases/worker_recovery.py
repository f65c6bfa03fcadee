"""Recovery of a worker between Close and Open: connect, transfer state, adopt.

State goes from a donor to a joiner point to point: a header (sizes), the schema, then the raw bytes
of all tensors in chunks. The joiner holds them in staging until Open, large tensors in host memory;
both ends report the digest, and the controller compares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import msgspec
import torch
import xxhash

from outlast.checkpoint.format import codec
from outlast.config import Limits, worker_settings
from outlast.controller.fault_spec import Where
from outlast.controller.sentinels.replay_rule import ReplayStanding
from outlast.errors import EXIT_GAVE_UP, CodecError, CorruptionError, GroupError
from outlast.events import Fault, FaultKind
from outlast.transport import messages
from outlast.worker.above_init.process_title import set_title
from outlast.worker.groups import GroupRegistry
from outlast.worker.sentinels.memory_sentinel import MemorySentinel, MemoryWord
from outlast.worker.sentinels.neighbour_replay import NeighbourReplay
from outlast.worker.sentinels.nonfinite_exceptions import ExceptionWord, NonFiniteExceptions
from outlast.worker.worker_status import WorkerStatus

CHUNK_BYTES = 8 << 20
Ticket = tuple[str, int, float]  # digest, bytes, seconds


def send_state(groups: GroupRegistry, seat: int, state: Any, tick: Callable[[], None]) -> Ticket:
    """Send `state` to `seat`; `tick` is called once a chunk. Raises GroupError."""
    start = time.monotonic()
    schema, tensors = codec.flatten(state)
    total = sum(t.numel() * t.element_size() for t in tensors)
    groups.controls().send(
        torch.tensor([len(schema), total], dtype=torch.int64, device="cpu"), seat, 0
    )
    head = torch.frombuffer(bytearray(schema), dtype=torch.uint8)
    groups.controls().send(head, seat, 1)
    hasher = xxhash.xxh3_128(schema)
    for chunk in _chunks(tensors):
        tick()
        hasher.update(codec.raw(chunk))
        groups.controls().send(chunk, seat, 2)
    return hasher.hexdigest(), total, time.monotonic() - start


def receive_state(groups: GroupRegistry, seat: int, tick: Callable[[], None]) -> tuple[Any, Ticket]:
    """Receive a sent state, large tensors on the CPU. Raises GroupError, CorruptionError."""
    start = time.monotonic()
    sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
    groups.controls().recv(sizes, seat, 0)
    schema_bytes, total = (int(x) for x in sizes)
    head = torch.zeros(schema_bytes, dtype=torch.uint8, device="cpu")
    groups.controls().recv(head, seat, 1)
    schema = head.numpy().tobytes()
    specs = codec.layout(schema)
    if (expected := sum(spec.size_bytes for spec in specs)) != total:
        raise CorruptionError(
            f"seat {seat} announced {total} bytes of state, but its schema has {expected}:"
            " nothing was adopted"
        )
    tensors = [spec.allocate() for spec in specs]
    hasher = xxhash.xxh3_128(schema)
    for chunk, views in _landing(tensors):
        tick()
        groups.controls().recv(chunk, seat, 2)
        hasher.update(codec.raw(chunk))
        at = 0
        for view in views:
            view.copy_(chunk[at : at + view.numel()])
            at += view.numel()
    ticket = hasher.hexdigest(), total, time.monotonic() - start
    staged = [spec.staged(tensor) for spec, tensor in zip(specs, tensors, strict=True)]
    return codec.unflatten(schema, staged), ticket


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _pieces(sizes: list[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield chunks as lists of (tensor, from, to); equal on both ends for equal sizes."""
    chunk: list[tuple[int, int, int]] = []
    room = CHUNK_BYTES
    for index, size in enumerate(sizes):
        at = 0
        while at < size:
            take = min(room, size - at)
            chunk.append((index, at, at + take))
            at += take
            room -= take
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _chunks(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    sizes = [t.numel() * t.element_size() for t in tensors]
    for pieces in _pieces(sizes):
        parts = [_raw(tensors[index])[start:stop].cpu() for index, start, stop in pieces]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


def _landing(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    flats = [_raw(t) for t in tensors]  # freshly allocated and contiguous: these are views
    for pieces in _pieces([f.numel() for f in flats]):
        views = [flats[index][start:stop] for index, start, stop in pieces]
        if len(views) == 1:
            yield views[0], []
        else:
            size = sum(view.numel() for view in views)
            yield torch.empty(size, dtype=torch.uint8, device="cpu"), views


def partners_of(seat: int, body: messages.Connect) -> tuple[int, ...]:
    """Return the ranks that hold each other's own state with this one; () for none."""
    return next((ranks for ranks in body.partners if seat in ranks), ())


# Of one rank, to all of a new generation:
_Words = tuple[list[str], MemoryWord, ReplayStanding, ExceptionWord]


class RecoveryOwner(Protocol):
    """The worker that recovers, as WorkerRecovery uses it."""

    def send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller."""

    def reach(self, where: Where) -> None:
        """Fire injected faults that are due at `where`."""

    def now_ns(self) -> int:
        """Return the time of the run's clock."""
        ...

    def replicated(self) -> Any:
        """Return the state for a joiner; this worker is the donor."""
        ...

    def adopt(self, state: Any) -> None:
        """Take over a donor's state."""

    def rebuild(self, copy: messages.Checkpointed) -> tuple[Any, Ticket]:
        """Return this rank's lost state, from a copy in keepers' memory."""
        ...

    def take_back(self, copy: messages.Checkpointed | None) -> None:
        """Put this rank back before its last step; its shards come from `copy`."""

    def compare(self, copy: messages.Checkpointed) -> None:
        """Compare this rank's shards with a copy from which another rank's are rebuilt."""

    def connect_partners(self, body: messages.Connect) -> None:
        """Exchange this rank's own state with its partners on other hosts."""

    def generation_opened(self, step: int) -> None:
        """Restore what a new generation has disturbed, DDP's buckets, and follow a change of the
        ranks that are present; `step`: committed steps."""

    def rehearsed(self) -> set[str]:
        """Return the keys of the functions that this worker has rehearsed."""
        ...

    def learn_rehearsed(self, keys: Iterable[str]) -> None:
        """Take note of the functions that another rank has rehearsed."""

    @property
    def exceptions(self) -> NonFiniteExceptions:
        """Exceptions of the script behind numbers that are not finite."""
        ...

    @property
    def memory(self) -> MemorySentinel:
        """Sentinel of allocations."""
        ...

    @property
    def replays(self) -> NeighbourReplay:
        """Replays on other ranks."""
        ...


class WorkerRecovery:
    """Recovery of one worker: follows the controller to the next generation, on the main thread.

    | message | action of the worker |
    |---|---|
    | `Decide` | takes its last step back if that is decided, answers `WorkerReady` |
    | `Connect` | builds the groups, sends or receives state, answers `Joined` |
    | `Open` | adopts the received state, and continues before phase n+1 |
    | `Stop` | ends the process |
    """

    def __init__(
        self, status: WorkerStatus, groups: GroupRegistry, limits: Limits, owner: RecoveryOwner
    ) -> None:
        self._status, self._groups, self._owner = status, groups, owner
        status.unreachable = groups.unreachable
        # The controller has deadlines for each part; this one only bounds the wait for a controller
        # whose loss the agent has not noticed.
        self.patience_s = 2 * (limits.ready_s + limits.status_s + limits.transfer_s)
        self._decided: messages.Decide | None = None
        self.staged: Any = None  # the job's state at n, until the walk to n is over
        self.seat = -1

    def vote_outcome(self) -> str:
        """Wait for the decision on a cast vote with a lost outcome; return "commit" or "redo"."""
        while True:
            body = self._status.next_message(self.patience_s)
            if isinstance(body, messages.Decide):
                self._note(body)
                return "commit" if body.n > self._status.n else "redo"
            self._stop(body)

    def recover(self) -> None:
        """Recover until a generation is open, with this worker before its phase n+1."""
        status = self._status
        status.enter("healing")
        self._owner.reach("heal")
        self.adopt_staged_state()
        self._groups.reap()
        if self._decided is not None or status.opened == 0:
            self._ready()
        while True:
            body = status.next_message(self.patience_s)
            match body:
                case messages.Decide():
                    self._note(body)
                    self._ready()
                case messages.Connect() if body.generation > status.closed:
                    self._connect(body)
                case messages.Open() if body.generation > status.closed:
                    self._open(body)
                    return
                case _:
                    self._stop(body)

    def adopt_staged_state(self) -> None:
        """Adopt the staged state once a generation with it was open. Repeated, because the script's
        code between walked phases (a scheduler's step) runs again."""
        if self.staged is not None and self._status.opened:
            self._owner.adopt(self.staged)

    def stay_as_donor(self) -> None:
        """Stay a possible donor after the script's end until the run ends."""
        while True:
            if not self._status.is_open:
                self.recover()
                self._status.enter("finished")
            body = self._status.next_message(float(1 << 30) / 1000)
            if isinstance(body, messages.Stop):
                return
            if isinstance(body, messages.Decide):
                self._note(body)

    def _note(self, body: messages.Decide) -> None:
        self._decided = body
        self._status.generation = max(self._status.generation, body.generation)

    def _ready(self) -> None:
        if self._decided is not None and self._decided.n < self._status.n:
            self._owner.take_back(self._decided.copy)
        self._owner.send(messages.WorkerReady(generation=self._status.generation, n=self._status.n))

    def _connect(self, body: messages.Connect) -> None:
        status = self._status
        status.generation = max(status.generation, body.generation)
        sent: dict[int, Ticket] = {}
        received: dict[int, Ticket] = {}
        try:
            partners = partners_of(self.seat, body)
            self._groups.connect(
                body.generation, body.timeout_s, body.transfers, partners, body.absent, body.units
            )
            self._exchange_words()
            for donor, joiner in body.transfers:
                if self.seat == donor:
                    sent[joiner] = send_state(
                        self._groups,
                        joiner,
                        self._owner.replicated(),
                        lambda: self._owner.reach("transfer"),
                    )
                elif self.seat == joiner:
                    self.staged, received[donor] = receive_state(
                        self._groups, donor, lambda: self._owner.reach("receive")
                    )
            if body.copy is not None and self.seat in body.rebuilt:
                self._owner.reach("receive")
                self.staged, received[self.seat] = self._owner.rebuild(body.copy)
            elif body.copy is not None and not status.joining:
                self._owner.compare(body.copy)
            self._owner.connect_partners(body)
        except (GroupError, CorruptionError, CodecError) as error:
            kind: FaultKind = "transfer" if isinstance(error, CorruptionError) else "transport"
            if isinstance(error, CodecError):
                kind = "contract"  # no donor can encode it
            status.report_fault(
                Fault(
                    kind=kind,
                    detail=str(error),
                    seat=self.seat,
                    n=status.n,
                    step=status.step + 1,
                    state=status.state,
                    t_ns=self._owner.now_ns(),
                )
            )
            return
        self._owner.send(messages.Joined(generation=body.generation, sent=sent, received=received))

    def _exchange_words(self) -> None:
        # If one rank has rehearsed a function, all count it as rehearsed: a rank that has not (its
        # predecessor has just died) would rehearse alone, while others wait in its collectives.
        memory, replays, exceptions = (
            self._owner.memory,
            self._owner.replays,
            self._owner.exceptions,
        )
        mine = sorted(self._owner.rehearsed()), memory.word(), replays.standing, exceptions.word()
        words: list[MemoryWord] = []
        raised: list[ExceptionWord] = []
        for answer in self._groups.gather_bytes(msgspec.msgpack.encode(mine)):
            keys, word, standing, error = msgspec.msgpack.decode(answer, type=_Words)
            self._owner.learn_rehearsed(keys)
            replays.learn(standing)
            words.append(word)
            raised.append(error)
        memory.learn(words)
        exceptions.learn(raised)

    def _open(self, body: messages.Open) -> None:
        if self.staged is not None:
            self._owner.adopt(self.staged)
        self._owner.generation_opened(body.step)
        self._decided = None
        self._status.joining = False
        self._status.requested = body.ask
        self._status.opened = body.generation
        if worker_settings():  # else the process belongs to its user
            set_title(self._groups.seat, body.generation)

    def _stop(self, body: messages.ControllerBody) -> None:
        if isinstance(body, messages.Stop):
            raise SystemExit(0 if body.ok else EXIT_GAVE_UP)
