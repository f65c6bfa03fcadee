"""Registry of all groups of one process: seats, generations, connections."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from outlast.controller.recovery.rank_units import Units
from outlast.errors import GroupError, StepRefused, UnsupportedError, UsageError
from outlast.transport import messages
from outlast.worker.groups.control_group import ControlGroup, ControlTree, control_members
from outlast.worker.groups.device_drivers import DeviceDriver, has_nccl, nccl_drivers
from outlast.worker.groups.gloo_device import GlooDevice
from outlast.worker.groups.inner_group import LIFE, InnerGroup, is_transport_error
from outlast.worker.groups.pending_works import Ended, PendingWorks, SeveredGroups, trackable
from outlast.worker.groups.rank_presence import RankPresence
from outlast.worker.groups.rendezvous import (
    BuildGuard,
    GenerationNotes,
    JobStore,
    Mailbox,
    meeting_name,
)
from outlast.worker.groups.setup_record import CollectiveRules, SetupRecord
from outlast.worker.groups.stable_group import BACKEND, StableGroup
from outlast.worker.sentinels.own_time import OwnTime

State = Literal["waiting", "dry", "connecting", "live", "closed"]


class GroupRegistry:
    """All process groups of one process. Collectives run on any thread, `deliver` and `sever` on
    the control thread, everything else on the main thread."""

    def __init__(
        self,
        *,
        mailbox: Mailbox,
        on_trouble: Callable[[BaseException], None],
        on_collective: Callable[[str], None],
        timeout_s: float,
        copy_s: float,
        interface: str | None = "",
    ) -> None:
        """`mailbox` passes rendezvous values to every rank. `on_trouble` gets a generation's first
        transport error, on any thread. `on_collective` gets the name of every collective of the
        script, and may raise. `timeout_s` bounds each operation, `copy_s` each `send` and `recv` of
        state. Raises ConfigError if gloo cannot listen on `interface`."""
        self._on_trouble = on_trouble
        self._on_collective = on_collective
        self._timeout_s, self._copy_s = timeout_s, copy_s
        self._device = GlooDevice(interface)
        self._drivers: list[DeviceDriver] = [self._device, *nccl_drivers()]
        self._mailbox = mailbox
        mailbox.address = self._device.address
        self._store: Store = JobStore()
        self._contract = CollectiveRules()
        self._severed = SeveredGroups()
        self._lock = threading.RLock()
        self._state: State = "waiting"
        self._generation = self._closed_to = self._dry_depth = 0
        self._connect_s = timeout_s
        self._stable: list[StableGroup] = []
        self._control: ControlGroup | None = None
        self._inners: list[InnerGroup] = []
        self._guard: BuildGuard | None = None
        self._works = PendingWorks(self.failed)
        self.live = False  # connected, and not inside dry(): collectives are real
        self.record = SetupRecord()
        self.presence = RankPresence()
        self.times = OwnTime()
        self.tape: Any = None  # a CollectiveTape, of the attempt under way
        self.make_group: Callable[..., StableGroup] = StableGroup  # of a hot spare: UnseatedGroup
        self.seat, self.world = -1, 0
        atexit.register(self.shutdown)

    # --- seats and generations ---

    @property
    def address(self) -> str:
        """host:port of this process's gloo listener."""
        return self._device.address

    def job_store(self) -> Store:
        """Return the store to pass to `init_process_group`."""
        return self._store

    def take_seat(self, seat: int, world: int, *, dry: bool) -> None:
        """Set this process's rank and world size. `dry`: answers are dry until it connects."""
        if self._state not in ("waiting", "dry"):
            raise UsageError(f"seat {seat} was taken after a generation had been connected")
        self.seat, self.world = self._mailbox.seat, self.times.world = seat, world
        self._state = "dry" if dry else "waiting"

    def deliver(self, body: messages.RendezvousValue | messages.Met) -> None:
        """Accept rendezvous values from other ranks."""
        self._mailbox.deliver(body)

    def connect(
        self,
        generation: int,
        timeout_s: float,
        copies: Sequence[tuple[int, int]] = (),
        partners: tuple[int, ...] = (),
        absent: Collection[int] = (),
        units: Units = (),
    ) -> None:
        """Build the control group and the inner groups of all stable groups, in order of creation.
        `copies`: (donor, joiner) of moves of state. `partners`: see ControlTree. `absent`, `units`:
        see RankPresence. Raises GroupError and closes the generation if a peer or time is lost."""
        with self._lock:
            if generation <= max(self._closed_to, self._generation):
                raise GroupError(f"generation {generation} was closed before it was connected")
            self._keep_severed()
            self._generation, self._state = generation, "connecting"
            self._works = PendingWorks(self.failed)
            self._connect_s = timeout_s
            self._mailbox.open(generation)
            self.presence.set(absent, self.world, units)
        try:
            with self._building(timeout_s) as guard:
                build = partial(self._build, guard=guard)
                here = self.presence.of(range(self.world))
                tree = ControlTree.connect(build, self.seat, here, copies, partners)
                self._control = ControlGroup(tree, generation, self._is_live, self._copy_s)
                for group in self._stable:
                    group.inner = self._build(group.meeting, group.ranks, guard)
        except BaseException:
            self._close(generation)
            raise
        with self._lock:
            if self._closed_to >= generation:
                raise GroupError(f"generation {generation} was closed while it was connected")
            self._state = "live"
            self._refresh()

    def sever(self, generation: int) -> None:
        """End this generation, once: wake its operations here and on peers, and refuse new ones.
        Thread-safe."""
        with self._lock:
            if generation <= self._closed_to or generation < self._generation:
                return
            self._closed_to = generation
            if generation > self._generation:
                self._mailbox.close(generation)  # not connected yet: connect() refuses it
                return
        self._close(generation)
        if self._guard is not None:
            self._guard.stir()
        self.cut()
        for inner in list(self._inners):
            inner.abort()

    def cut(self) -> None:
        """Break this process's own connections, as a failing network does."""
        for driver in self._drivers:
            driver.cut(self._mailbox.listeners(self._generation))
        self._works.give_up()

    def reap(self) -> int:
        """Drop the groups of severed generations, waiting at most a second. Return the number of
        generations that stay because an operation still runs on them."""
        with self._lock:
            if self._state == "closed":
                self._keep_severed()
        return self._severed.reap()

    def stuck(self, generation: int) -> int:
        """Return how many operations gloo has not ended in the severed generation. Thread-safe."""
        with self._lock:
            if generation != self._generation or self._state != "closed":
                return 0
            works, control = self._works, self._control
        return works.stuck() + (control is not None and control.busy)

    def unreachable(self, generation: int) -> frozenset[str]:
        """Return peers' listeners that did not answer when groups were connected. Thread-safe."""
        guard = self._guard if generation == self._generation else None
        return guard.unreachable if guard else frozenset()

    def is_waiting(self) -> bool:
        """Return whether an operation that is under way needs other ranks to end. Thread-safe."""
        with self._lock:
            works, control = self._works, self._control
        return bool(works.stuck()) or (control is not None and control.busy)

    def shutdown(self) -> None:
        """Cut running operations and drop all inner groups while the interpreter is alive."""
        with self._lock:
            generation = self._generation
            control = self._control
            busy = bool(self._works.running()) or (control is not None and control.busy)
        if busy:
            self.sever(generation)
        self._close(generation)
        with self._lock:
            self._keep_severed()
        self._severed.reap()
        atexit.unregister(self.shutdown)
        # Both refer to this registry, which else is not freed with its last reference.
        self._stable, self._works = [], PendingWorks(lambda _: None)

    # --- phases ---

    def start_phases(self) -> None:
        """Make collectives outside a phase raise PhaseError, and watch connections, from now on."""
        if self._contract.start():
            self._device.watch(self._mailbox.listeners(self._generation))

    def phase(self) -> AbstractContextManager[None]:
        """Return a context in which collectives are allowed."""
        self._works.forget_failures()
        return self._contract.phase()

    def seal(self) -> None:
        """Make further collectives in this phase raise PhaseError, since its vote is over."""
        self._contract.seal()

    def unfinished(self) -> int:
        """Return how many returned works have not completed, or failed."""
        return self._works.unfinished()

    @contextmanager
    def dry(self) -> Iterator[None]:
        """Give dry answers in all groups inside this context, connected or not."""
        self._dry_depth += 1
        self._refresh()
        try:
            yield
        finally:
            self._dry_depth -= 1
            self._refresh()

    # --- the control group ---

    def controls(self) -> ControlGroup:
        """Return the control group of the connected generation. Raises GroupError."""
        control = self._control
        if control is None or self._state != "live":
            raise GroupError(f"the control group of generation {self._generation} is {self._state}")
        return control

    def vote(self, place: str, share: int = 0) -> bool:
        """Return whether all vote yes on `place`, and shares add up to 0. Raises GroupError."""
        return self.controls().vote(place, share)

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Gather small values; return every rank's bytes by seat. Raises GroupError."""
        return self.controls().gather_bytes(value)

    # --- calls of stable groups ---

    def adopt(
        self, name: str, ranks: tuple[int, ...], rank: int, size: int, backend: str = BACKEND
    ) -> StableGroup:
        """Return a new stable group, connected at once in a live generation. Raises GroupError."""
        ranks = ranks or tuple(range(size))
        meeting = meeting_name(ranks, sum(group.ranks == ranks for group in self._stable))
        group = self.make_group(self, name, ranks, rank, meeting, backend)
        if self.live:
            try:
                with self._building(self._connect_s) as guard:
                    group.inner = self._build(group.meeting, ranks, guard)
            except GroupError as error:
                self.failed(error)
                raise
        group.number = len(self._stable)
        self._stable.append(group)
        return group

    def entering(self, op: str, args: tuple[Any, ...]) -> None:
        """Check that a collective is allowed here. Raises PhaseError, UnsupportedError."""
        if not self._dry_depth:
            self._contract.check(op)
        self._on_collective(op)
        if self.live:
            self._works.prune()
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and args:
            raise UnsupportedError(
                f"{op} inside a CUDA graph: a captured collective belongs to one generation only;"
                " capture the computation without its collectives"
            )

    def admit(self, op: str, group: str) -> bool:
        """Check a collective that no inner group runs. Return True for a dry answer, False for
        defined bytes. Raises StepRefused when the generation is closed, outside backward."""
        if self._dry_depth or self._state == "dry":
            return True
        if self._state != "closed":
            raise GroupError(
                f"{op} on group {group!r}, which no generation has connected (it is"
                f" {self._state}); make groups before the first phase"
            )
        if torch._C._current_graph_task_id() == -1:  # noqa: SLF001 - no public function
            raise StepRefused(f"{op}: generation {self._generation} is closed")
        return False

    def failed(self, error: BaseException) -> bool:
        """Return whether `error` is one of lost connections; the first is reported."""
        if not is_transport_error(error):
            return False
        with self._lock:
            first = self._state == "live"
            if first:
                self._state = "closed"
                self._refresh()
        if first:
            self._on_trouble(error)
        return True

    def notes(self, name: str, rank: int, ranks: tuple[int, ...]) -> GenerationNotes:
        """Return notes that the ranks of a group leave for each other."""
        return GenerationNotes(self._mailbox, lambda: self._generation, name, rank, ranks)

    def leave(self, group: StableGroup) -> None:
        """Do nothing: a joiner that has not yet destroyed `group` builds it and waits for all."""

    def aborted(self, group: str) -> None:
        """End this generation, whose `group` the script aborted."""
        self.failed(GroupError(f"the script aborted group {group!r}"))
        self.sever(self._generation)

    def handed_out(
        self, group: int, op: str, outputs: list[torch.Tensor], work: dist.Work | None, ended: Ended
    ) -> dist.Work | None:
        """Return the work for the caller, or None from NCCL when the call has synchronised."""
        record = self.record
        entry = record.note(group, op, outputs) if record.recording else None
        if not (on_cpu := outputs[0].is_cpu if outputs else not has_nccl()):
            self._works.on_device()
        if entry is not None and op != "send":
            ended = partial(record.capture, entry, outputs)
        if work is None:
            if ended is not None:
                ended()
            return None
        is_live = partial(self._is_live, self._works) if not record.recording else None
        handle = trackable(op, work, on_cpu=on_cpu, ended=ended, is_live=is_live, own=self.times)
        self._works.add(op, handle, outputs, on_cpu=on_cpu)
        return handle

    def members(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of this generation's groups, under their names in torch's recorder."""
        groups = control_members(self.seat, self.presence.of(range(self.world)))
        groups.update((group.meeting, group.ranks) for group in self._stable)
        return {f"{name}{LIFE}{self._generation}": ranks for name, ranks in groups.items()}

    @contextmanager
    def _building(self, timeout_s: float) -> Iterator[BuildGuard]:
        box, generation, deadline_s = self._mailbox, self._generation, time.monotonic() + timeout_s
        with BuildGuard(self._device, deadline_s, box, generation) as self._guard:
            yield self._guard
        if self._contract.started:
            self._device.watch(box.listeners(generation))

    def _build(self, name: str, ranks: tuple[int, ...], guard: BuildGuard) -> InnerGroup:
        ranks = self.presence.of(ranks)
        inner = InnerGroup(
            name,
            ranks,
            ranks.index(self.seat),
            generation=self._generation,
            mailbox=self._mailbox,
            drivers=self._drivers,
            guard=guard,
            timeout_s=self._timeout_s,
        )
        self._inners.append(inner)
        return inner

    def _close(self, generation: int) -> None:
        with self._lock:
            if generation == self._generation and self._state in ("connecting", "live"):
                self._state = "closed"
            self._mailbox.close(generation)
            self._refresh()

    def _is_live(self, works: PendingWorks | None = None) -> bool:
        return self._state == "live" and works in (None, self._works)

    def _refresh(self) -> None:
        self.live = self._state == "live" and self._dry_depth == 0

    def _keep_severed(self) -> None:
        for group in self._stable:
            group.inner = None
        if self._inners:
            self._severed.keep(self._inners, self._works, self._control)
        self._inners, self._control = [], None
