"""One worker process: puts its parts together, and lives from `init()` to the end of the script."""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from outlast import wire
from outlast.checkpoint import tree
from outlast.config import (
    Limits,
    WorkerSettings,
    gloo_interface,
    local_rank,
    set_rank,
)
from outlast.core import faults as fault_language
from outlast.errors import (
    EXIT_INTERRUPTED,
    GaveUpError,
    PhaseError,
    ProtectError,
    StepRefused,
    UsageError,
)
from outlast.events import Fault, FaultKind
from outlast.observe.store import EventWriter
from outlast.page import Page
from outlast.worker import checkpointing
from outlast.worker.device import device_of
from outlast.worker.faults import Faults
from outlast.worker.fingerprint import fingerprint
from outlast.worker.groups import Groups, register
from outlast.worker.groups import Record as GroupRecord
from outlast.worker.healing import Healer
from outlast.worker.link import Link
from outlast.worker.local import LocalControl
from outlast.worker.loop import Loop
from outlast.worker.moment import Moment
from outlast.worker.phases import Phases
from outlast.worker.place import Place, walk_from
from outlast.worker.protected import Protected, reset_reducers
from outlast.worker.timeline import Timeline

STUCK_S = 2.0


class _Record(msgspec.Struct, frozen=True):
    """What set-up and rehearsals returned on this seat, for the workers after this one."""

    groups: bytes
    gated: tuple[str, ...]


class Worker:
    """The process behind a Session."""

    def __init__(self, settings: WorkerSettings | None) -> None:
        self.limits = settings.limits if settings else Limits()
        self._settings = settings
        self.local_rank = local_rank()
        self.device = device_of(self.local_rank)
        self.page = Page(settings.page_fd) if settings else Page.create()
        name = settings.worker if settings else "alone"
        run_dir = Path(settings.run_dir) if settings else None
        writer = EventWriter(run_dir / "events", name) if run_dir else None
        self.timeline = Timeline(writer, name)
        self._shared: queue.Queue[wire.SharedIs | wire.SharedMake] = queue.Queue(maxsize=64)
        self.state: dict[str, Any] = {}
        self.place = Place()
        self._failed = False
        self._seat_body: wire.Seat | None = None
        self.groups = Groups(
            publish=lambda g, key, value: self.link.send(
                wire.Put(generation=g, key=key, value=value)
            ),
            on_trouble=self._trouble,
            on_collective=lambda _name: self.moment.collective(),
            timeout_s=self.limits.transfer_s,
            interface=gloo_interface(),
        )
        self.moment = Moment(self.page, lambda body: self.link.try_send(body), self.groups.sever)
        self.link = (
            Link(settings, self._heard, self._orphaned) if settings else LocalControl(self._heard)
        )
        self.faults = Faults(
            [fault_language.parse(text) for text in settings.faults] if settings else [],
            (run_dir or Path()) / "faults",
            self.timeline,
            lambda: (self.moment.n, self.moment.step),
            lambda: self.groups.cut(),
            lambda: self.phases.is_real,
        )
        self.healer = Healer(
            self.moment, self.groups, self.link.send, self.limits,
            replicated=lambda: self._need().replicated(),
            adopt=lambda state: self._need().adopt(state),
            opened=self._opened,
            tick=self.faults.reach,
        )  # fmt: skip
        self.phases = Phases(
            moment=self.moment, groups=self.groups, healer=self.healer, timeline=self.timeline,
            place=self.place, put_slot=self.page.put, watch=self.faults.reach,
            alone=settings is None,
        )  # fmt: skip
        self.phases.on_settled = self._tell_record
        self.phases.drain = self._drain
        self.loop = Loop(
            phases=self.phases, place=self.place, moment=self.moment, groups=self.groups,
            timeline=self.timeline, boundary=self._boundary,
        )  # fmt: skip

    def _trouble(self, error: BaseException) -> None:
        self.moment.trouble(self._fault("transport", str(error)[:2000]))

    def _fault(self, kind: FaultKind, detail: str, trace: str = "") -> Fault:
        return Fault(
            kind=kind, detail=detail, traceback=trace[-8000:], seat=self.healer.seat,
            n=self.moment.n, step=self.moment.step + 1, t_ns=time.time_ns(),
        )  # fmt: skip

    # --- taking a seat ---

    def take_seat(self) -> None:
        """Block until the controller gives this worker a seat, then make the process group."""
        self.moment.enter("waiting")
        if self._settings and self._settings.seat < 0:
            # The first optimizer step imports it, for most of a second: a spare has time now.
            importlib.import_module("torch._dynamo")
        self.link.send(
            wire.Hello(
                pid=os.getpid(), fingerprint=fingerprint(self.device), address=self.groups.address
            )
        )
        if self._settings and self._settings.seat < 0:
            self.faults.warm()
        body = self._wait_for_seat()
        self._seat_body = body
        self.seat, self.world = body.seat, body.world
        self.healer.seat = self.timeline.seat = self.faults.seat = body.seat
        self.moment.generation = max(self.moment.generation, body.generation)
        self.moment.n = body.n
        self.moment.joining = not body.first
        set_rank(body.seat, body.world)
        if not body.first:
            self._prepare_walk(body)
        elif body.checkpoint:
            slot = checkpointing.load_slot(body.checkpoint, body.seat)
            self._walk({f"before:{body.n}": slot}, body.n)
        self.groups.take_seat(body.seat, body.world, dry=not body.first)
        if body.first:
            self.healer.heal()
            self.timeline.generation = self.moment.opened
        register(self.groups)
        dist.init_process_group(
            "outlast", store=self.groups.job_store(), rank=body.seat, world_size=body.world
        )
        self.moment.enter("setup")
        self.faults.reach("setup")
        if self._settings:
            self.checkpointer = checkpointing.Checkpointer(
                root=Path(self._settings.run_dir) / "checkpoints", job=self._settings.run,
                seat=self.seat, groups=self.groups, moment=self.moment, timeline=self.timeline,
                send=self.link.send, watch=self.faults.reach,
            )  # fmt: skip

    def _wait_for_seat(self) -> wire.Seat:
        while True:  # a spare waits as long as the run lasts; the link's end ends it
            try:
                body = self.moment.inbox.get(timeout=60.0)
            except queue.Empty:
                continue
            if isinstance(body, wire.Seat):
                return body
            if isinstance(body, wire.Stop):
                raise SystemExit(0)

    def _prepare_walk(self, body: wire.Seat) -> None:
        record = msgspec.msgpack.decode(body.record, type=_Record)
        self.groups.record = GroupRecord.decode(record.groups)
        self.phases.gated_elsewhere = set(record.gated)
        self._walk(dict(body.slots), body.n)

    def _walk(self, slots: dict[str, bytes], n: int) -> None:
        walk = walk_from(slots, n)
        if walk is None:
            raise GaveUpError(f"seat {self.seat} has no state for the place before phase {n + 1}")
        self.phases.walk = walk
        self.place.saved_step = walk.slot.saved_step
        self.moment.step = 0 if walk.slot.batch else walk.slot.step

    # --- the script's calls ---

    def protect(self, named: Mapping[str, Any]) -> None:
        if self.phases.protected is not None:
            raise ProtectError(
                "protect() was called twice, or after the first phase: build everything, protect"
                " it once, then run; nothing was applied"
            )
        protected = Protected(named, self.state)
        self.phases.protected = protected
        digest, summary = protected.schema()
        self.link.send(wire.Protected(schema=digest, summary=summary))
        if self.faults:
            for module in protected.modules.values():
                self.faults.watch_model(module, lambda: self.loop.pending)
            for optimizer in protected.optimizers.values():
                optimizer.register_step_post_hook(lambda *_: self._applied())
        body = self._seat_body
        if body is not None and body.first and body.checkpoint:
            protected.adopt(checkpointing.load_model(body.checkpoint))

    def _applied(self) -> None:
        if self.phases.attempt is not None:
            self.faults.reach("apply")

    def run(self, key: str, call: Callable[[], Any]) -> Any:
        if self.phases.protected is None:
            self.protect({})
        kind = "step" if self.loop.pending else "eval"
        result = self.phases.run(call, key=key, kind=kind)
        self.loop.pending = False
        return result

    def batches(self, loader: Any, until: int | None, epochs: int | None) -> Iterator[Any]:
        if self.phases.protected is None:
            raise UsageError("call session.protect(...) before session.batches(...)")
        return self.loop.run(loader, until, epochs)

    def report(self, values: dict[str, float]) -> None:
        if self.phases.attempt is not None:
            self.phases.attempt.reports.update(values)
            return
        walk = self.phases.walk
        if walk is None or (walk.after and not self.phases.result_lost):
            self.moment.loss = values.get("loss", self.moment.loss)
            self.timeline.metrics(self.moment.step, values)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 2 * self.limits.shared_s
        self.link.send(wire.SharedAsk(name=name))
        while True:
            try:
                answer = self._shared.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise GaveUpError(
                    f"no answer for the shared value {name!r}"
                    f" after {2 * self.limits.shared_s:.0f} s"
                ) from None
            if answer.name != name:
                continue
            if isinstance(answer, wire.SharedMake):
                self.link.send(wire.SharedMade(name=name, value=tree.encode(make())))
            else:
                return tree.decode(answer.value)

    # --- between steps ---

    def _boundary(self, next_batch: bytes) -> None:
        """Between two steps; `next_batch` says how to draw the batch that comes."""
        self.faults.reach("between")
        every = self._settings.checkpoint_every if self._settings else 0
        step = self.moment.step
        if every and step and step % every == 0 and step != self.place.saved_step:
            self._checkpoint(next_batch)
            self.place.saved_step = step

    def _checkpoint(self, next_batch: bytes = b"") -> None:
        """Save what a fresh start needs to stand here: with `next_batch` at the top of the next
        step, else where the script is."""
        protected = self._need()

        def save() -> None:
            own = tree.encode(protected.own_state())
            slot = self.place.slot(self.moment.n, self.moment.step, own)
            slot = msgspec.structs.replace(slot, saved_step=self.moment.step)
            if next_batch:
                slot = msgspec.structs.replace(slot, batch=next_batch, done=(), at_draw=True)
            self.checkpointer.save(protected, slot.pack())

        self.phases.run(save, key="outlast.checkpoint", kind="checkpoint")

    def _drain(self) -> None:
        self.moment.draining = False
        self._checkpoint()
        raise SystemExit(EXIT_INTERRUPTED)

    def _opened(self) -> None:
        if self.phases.protected is not None:
            reset_reducers(self.phases.protected)

    def _need(self) -> Protected:
        if self.phases.protected is None:
            raise PhaseError("session.protect(...) must come before the first phase")
        return self.phases.protected

    def _tell_record(self) -> None:
        if self._seat_body is not None and self._seat_body.first:
            self.groups.record.stop()
            record = _Record(self.groups.record.encode(), tuple(sorted(self.phases.settled)))
            self.link.send(wire.Recorded(seat=self.seat, record=msgspec.msgpack.encode(record)))

    # --- the reader thread ---

    def _heard(self, body: wire.AnyBody) -> None:
        match body:
            case wire.Close():
                self.moment.close(body)
                look = threading.Timer(STUCK_S, self._look_for_stuck, [body.generation])
                look.daemon = True
                look.start()
            case wire.Got():
                self.groups.deliver(body.generation, body.key, body.value)
            case wire.SharedIs() | wire.SharedMake():
                self._shared.put(body)
            case wire.Seat() | wire.Decide() | wire.Connect() | wire.Open() | wire.Stop():
                self.moment.inbox.put(body)
            case _:
                pass

    def _look_for_stuck(self, generation: int) -> None:
        if left := self.groups.stuck(generation):
            self.moment.lost(
                "broken",
                self._fault(
                    "transport",
                    f"{left} collective(s) of generation {generation} did not end within"
                    f" {STUCK_S:.0f} s after their connections were cut: this process waits in"
                    " gloo and cannot be put back",
                ),
            )

    def _orphaned(self, reason: str) -> None:
        # Without its agent this worker belongs to nobody: it must not touch anything any more.
        sys.stderr.write(f"outlast: {reason}; this worker ends\n")
        os._exit(1)

    # --- the end ---

    def finish(self) -> None:
        """At interpreter exit: stay a donor until everybody has ended."""
        if not self._failed and self.moment.opened:
            try:
                self.moment.enter("finished")
                self.link.send(wire.Finished(n=self.moment.n))
                self.healer.linger()
            except (SystemExit, GaveUpError):
                pass
        self.phases.gate.close()
        self.link.close()
        self.groups.shutdown()
        self.timeline.close()

    def uncaught(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        """sys.excepthook: the controller hears the cause before the process is gone."""
        self._failed = True
        sys.__excepthook__(kind, error, trace)
        if isinstance(error, StepRefused):
            return  # the failure is another rank's
        text = "".join(traceback.format_exception(kind, error, trace))
        cause: FaultKind = "contract" if issubclass(kind, UsageError) else "raised"
        self.moment.trouble(self._fault(cause, f"{kind.__name__}: {error}"[:2000], text))
