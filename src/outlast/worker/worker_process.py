"""One worker process, from `init()` to the end of the script."""

from __future__ import annotations

import importlib
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from outlast.config import Limits, WorkerSettings, gloo_interface, local_rank, set_rank
from outlast.controller import fault_spec as fault_language
from outlast.errors import GaveUpError, ProtectError, StepRefused, UsageError
from outlast.events import FaultKind
from outlast.job_signals import JobSignals
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker import flight_recorder_dump
from outlast.worker.above_init import start_files
from outlast.worker.auditor import Auditor
from outlast.worker.batch_loop import BatchLoop
from outlast.worker.compute_environment import device_of, hello, is_unassigned
from outlast.worker.controller_link import (
    ControllerLink,
    SharedValueClient,
    StandaloneControl,
    end_process,
)
from outlast.worker.copied_shards import CopiedShards
from outlast.worker.groups import GroupRegistry, is_caused_by_transport, register
from outlast.worker.groups import SetupRecord as GroupRecord
from outlast.worker.groups.rendezvous import Mailbox
from outlast.worker.injected_faults import InjectedFaults, spare_number
from outlast.worker.phases.absent_parts import AbsentParts
from outlast.worker.phases.phase_attempt import deep_copy
from outlast.worker.phases.phase_runner import PhaseRunner
from outlast.worker.phases.returned_rank import merged_slots
from outlast.worker.phases.script_progress import Intervals, ScriptProgress, walk_from
from outlast.worker.phases.step_calls import StepCalls
from outlast.worker.phases.worker_recovery import WorkerRecovery
from outlast.worker.save_timing import SaveTimer, first_intervals
from outlast.worker.script.script_variables import ScriptVariables
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_ports import STUCK_S, WorkerPorts
from outlast.worker.worker_status import PulseThread, WorkerStatus

if TYPE_CHECKING:
    from outlast.worker.checkpoint_restore import RunRestorer

_SAVES = "outlast.worker.worker_checkpointing"  # a script that runs alone need not load it


class WorkerProcess(WorkerPorts):
    """The process behind a Session."""

    def __init__(self, settings: WorkerSettings | None) -> None:
        self.limits = settings.limits if settings else Limits()
        self._settings = settings
        self.local_rank = local_rank()
        self.device = device_of(self.local_rank, is_spare=bool(settings and settings.seat < 0))
        self.page = Page(settings.page_fd) if settings else Page.create()
        run_dir = Path(settings.run_dir) if settings else None
        self.timeline = WorkerEvents.of_worker(settings)
        self.state: dict[str, Any] = {}
        self.place = ScriptProgress()
        self.calls = StepCalls()
        self._failed = False
        self._seat_body: messages.Seat | None = None
        self.restorer: RunRestorer | None = None
        self.groups = GroupRegistry(
            mailbox=Mailbox(self.publish),
            on_trouble=self.report_trouble,
            on_collective=self.collective_started,
            timeout_s=self.limits.operation_s,
            copy_s=self.limits.transfer_s,
            interface=gloo_interface(),
        )
        self.absent_parts = AbsentParts(self.groups)
        self.status = WorkerStatus(self.page, self.try_send, self.groups.sever, self.groups.times)
        self.pulse = PulseThread(self.page, self.groups.is_waiting, self.limits.hang_floor_s)
        self.signals = JobSignals(
            lambda: self.status.is_open,
            settings.notice_signals if settings else (),
            lambda number: self.try_send(messages.NoticeSignal(signal=number)),
        )
        self.shared_values = SharedValueClient(self.send, self.limits)
        self.link = StandaloneControl(self._on_message)
        if settings:
            self.link = ControllerLink(settings, self._on_message, end_process)
        specs = [fault_language.parse(text) for text in settings.faults] if settings else []
        self.faults = InjectedFaults(specs, (run_dir or Path()) / "faults", self.timeline, self)
        self.recovery = WorkerRecovery(self.status, self.groups, self.limits, self)
        on_unrepeatable = settings.on_unrepeatable if settings else ""
        self.script = ScriptVariables(self.identities, on_unrepeatable, self.note)
        self.start_files = start_files.of_worker(self.note, self.limits.join_s)
        self.script.dry = self.start_files.dry
        self.phases = PhaseRunner(
            status=self.status,
            groups=self.groups,
            recovery=self.recovery,
            timeline=self.timeline,
            place=self.place,
            watch=self.reach,
            script=self.script,
            standalone=settings is None,
        )
        self.phases.on_record = self._tell_record
        self.copies = CopiedShards(settings, self.status, self.protected_state)
        self.phases.slots.copied = self.copies.current
        self.phases.step_redo.put_back = self.copies.put_back
        self._follow_phases(settings)

    def _follow_phases(self, settings: WorkerSettings | None) -> None:
        every, patience_s = settings.audit_every if settings else 0, self.limits.status_s
        self.auditor = Auditor(self.status, self.groups, self, every=every, patience_s=patience_s)
        self.hook_phases(settings.replay_every if settings else 0)
        self.saver = SaveTimer(
            self.phases,
            self.place,
            self.status,
            self.reach,
            until_step=settings.until_step if settings else 0,
            refuses=self.refuses_save,
            need=self.protected_state,
        )
        self.phases.save_on_request = self.saver.on_request
        self.status.presence = self.presence_report
        self.loop = BatchLoop(
            phases=self.phases,
            place=self.place,
            status=self.status,
            groups=self.groups,
            timeline=self.timeline,
            saver=self.saver,
            script=self.script,
            auditor=self.auditor,
        )
        self.loop.ranks.are_compared = settings is not None and settings.may_shrink
        self.phases.idle_ranks = self.loop.idle_ranks
        self.phases.nonfinite.configure(settings, lambda: self.loop.batch)

    def take_seat(self) -> None:
        """Block until the controller gives this worker a seat, then make the process group."""
        self._reach_init()
        self._sit(self._wait_for_seat())

    def _reach_init(self) -> None:
        self.status.enter("waiting")
        self.start_files.reach_init()
        self._greet()
        if self._settings:
            self.signals.take()
            self.pulse.start()
            importlib.import_module(_SAVES)  # while the controller decides
        if self._settings and self._settings.seat < 0:
            self.faults.warm(spare_number(self._settings))

    def _sit(self, body: messages.Seat) -> None:
        self._note_seat(body)
        if not body.first:
            self._prepare_walk(body)
        elif body.checkpoint:
            self._prepare_restore(body.seat, body.n, body.checkpoint)
        self.groups.take_seat(body.seat, body.world, dry=not body.first)
        if body.first:
            self.trust_torch()
            self.status.is_before_setup = True
            self.recovery.recover()
            self.timeline.generation = self.status.opened
        self._make_process_group(body.seat, body.world)
        self._enter_setup(first=body.first)

    def _note_seat(self, body: messages.Seat) -> None:
        self._seat_body = body
        self.seat, self.world = body.seat, body.world
        self.copies.seat = self.recovery.seat = self.timeline.seat = self.faults.seat = body.seat
        self.status.generation = max(self.status.generation, body.generation)
        self.status.n = body.n
        self.status.joining = not body.first
        had_none = is_unassigned(self.device)
        if had_none or body.local_rank not in (-1, self.local_rank):
            self.local_rank = body.local_rank if body.local_rank >= 0 else self.local_rank
            self.device = device_of(self.local_rank)
        if had_none:
            self._greet()  # the controller compares the rest of the fingerprint
        group_rank = body.seat // self._settings.ranks_per_node if self._settings else 0
        set_rank(body.seat, body.world, self.local_rank, group_rank)

    def _make_process_group(self, rank: int, world: int) -> None:
        register(self.groups)
        store = self.groups.job_store()
        dist.init_process_group("outlast", store=store, rank=rank, world_size=world)

    def _enter_setup(self, *, first: bool) -> None:
        self.status.enter("setup")
        self.status.is_before_setup = False
        self.faults.reach("setup")
        if self._settings:
            self._prepare_saves(self._settings, first=first)

    def _greet(self) -> None:
        self.link.send(hello(self.device, self.groups.address))

    def _prepare_restore(self, seat: int, n: int, origin: messages.Checkpointed) -> None:
        from outlast.worker.checkpoint_restore import RunRestorer

        assert self._settings is not None
        self.restorer = RunRestorer(self._settings, seat, origin)
        # On another machine no other process has these values.
        self.shared_values.known = self.restorer.shared
        self._walk({f"before:{n}": self.restorer.slot}, n)

    def _prepare_saves(self, settings: WorkerSettings, *, first: bool) -> None:
        from outlast.worker.worker_checkpointing import RunCheckpointer

        begun_at = self.restorer.place if self.restorer else None
        if first:  # settings of this start replace those of an earlier start
            self.place.every = first_intervals(settings)
        self.saver.checkpointer = RunCheckpointer(
            settings,
            self.groups,
            self.status,
            self,
            self.shared_values.known,
            absent=self.absent_parts,
            joins=not first,
            begun_at=begun_at,
        )

    def _wait_for_seat(self) -> messages.Seat:
        while True:  # a spare waits as long as the run lasts; the link's end ends it
            try:
                body = self.status.inbox.get(timeout=60.0)
            except queue.Empty:
                continue
            if isinstance(body, messages.Seat):
                return body
            if isinstance(body, messages.Stop):
                raise SystemExit(0)

    def _prepare_walk(self, body: messages.Seat) -> None:
        self.groups.record = GroupRecord.decode(body.record)
        self.start_files.begin()
        self._walk(merged_slots(body.slots, body.n, body.seat), body.n)

    def _walk(self, slots: dict[str, bytes], n: int) -> None:
        walk = walk_from(slots, n)
        if walk is None:
            raise GaveUpError(f"seat {self.seat} has no state for the place before phase {n + 1}")
        self.phases.joining.walk, self.phases.slots.inherited = walk, slots
        self.place.saved_step = walk.slot.saved_step
        self.place.every = walk.slot.every
        self.status.step = 0 if walk.slot.batch or walk.slot.epoch else walk.slot.step

    # --- the script's calls ---

    def protect(self, named: Mapping[str, Any]) -> None:
        """Set the state that must survive."""
        self.start_files.put_back()
        if not self.status.joining and self.seat == 0 and self._settings:
            self.script.at_protect()
        if self.phases.protected is not None:
            raise ProtectError(
                "protect() was called twice, or after the first phase: build everything, protect"
                " it once, then run; nothing was applied"
            )
        protected = ProtectedState(named, self.state)
        protected.script = self.script.carried
        self.phases.protected = protected
        self.report_schema(protected)
        self.watch(protected)
        if self.restorer is not None:
            self.restorer.restore(protected)
            self.restorer = None
            # The script's code between walked phases will change it again.
            self.recovery.staged = deep_copy(protected.replicated(), "cpu")

    def run(
        self, key: str, function: Callable[..., Any], call: Callable[[], Any], *, undo: bool
    ) -> Any:
        """Run a phase until the whole job has completed it."""
        if self.phases.protected is None:
            self.protect({})
        self.start_files.put_back(for_good=self._has_walked())
        kind = "step" if self.loop.pending else "eval"
        if kind == "step":
            self.calls.note(key, call, self.loop.first_batch)
        self.loop.begin_phase(key, call)
        result = self.phases.run(call, key=key, kind=kind, function=function, undo=undo)
        self.loop.end_phase()
        self.start_files.put_back(for_good=self._has_walked())
        return result

    def _has_walked(self) -> bool:
        return (walk := self.phases.joining.walk) is None or not walk.remaining

    def enter_loop(self, loader: Any) -> BatchLoop:
        """Return the loop over a loader's batches, or over epochs (None)."""
        if self.phases.protected is None:
            raise UsageError("call session.protect(...) before session.batches() and epochs()")
        self.start_files.put_back(for_good=True)
        if not any(known is loader for known in self.phases.protected.loaders):
            self.phases.protected.loaders.append(loader)
        return self.loop

    def report(self, values: dict[str, float]) -> None:
        """Report metrics of the phase under way."""
        if self.phases.attempt is not None:
            self.phases.attempt.reports.update(values)
            return
        joining = self.phases.joining
        if joining.walk is None or (joining.walk.after and not joining.result_lost):
            self.status.loss = values.get("loss", self.status.loss)
            self.timeline.metrics(self.status.step, values)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that one rank makes for all."""
        return self.shared_values.get(name, make)

    def _tell_record(self) -> None:
        if self._seat_body is not None and self._seat_body.first:
            if is_complete := bool(self.phases.joining.rehearsed_here):
                self.groups.record.stop()  # rehearsals are set-up too: DDP makes its buckets there
            calls = self.calls.encode() if is_complete else b""
            record = self.groups.record.encode()
            self.link.send(messages.Recorded(seat=self.seat, record=record, calls=calls))

    def _on_message(self, body: messages.AnyBody) -> None:
        match body:
            case messages.Close():
                self.status.close(body)
                self.start_files.guard(is_held=self.status.is_refused)
                self.auditor.wake()
                look = threading.Timer(STUCK_S, self.look_for_stuck, [body.generation])
                look.daemon = True
                look.start()
            case messages.RendezvousValue() | messages.Met():
                self.groups.deliver(body)
            case messages.SharedValueReply() | messages.SharedValueMake():
                self.shared_values.deliver(body)
            case messages.Trace() if self._settings is not None:
                folder = Path(self._settings.run_dir)
                place = flight_recorder_dump.DumpPlace(folder, self.recovery.seat)
                flight_recorder_dump.answer(body, place, self.groups.members(), self.link.try_send)
            case messages.AuditRequest() | messages.AuditAgreed():
                self.auditor.hear(body)
            case messages.Leave():
                self.status.leave(body.generation)
            case messages.SaveEvery():
                self.saver.proposal = Intervals(body.memory, body.disk)
            case (
                messages.Seat()
                | messages.Prepare()
                | messages.Decide()
                | messages.Connect()
                | messages.Open()
                | messages.Stop()
            ):
                self.status.term = self.link.term
                if isinstance(body, messages.Stop) or getattr(body, "ask", "") == "drain":
                    self.signals.answer()
                self.status.inbox.put(body)

    def finish(self) -> None:
        """Remain a donor at interpreter exit until all ranks have ended."""
        if not self._failed and self.status.opened:
            with suppress(SystemExit, GaveUpError):
                if self.phases.joining.walk is not None:
                    self.phases.joining.join()
                if self.phases.step_redo.end_offer():
                    self.phases.joining.recover()
                self.saver.wait_durable(self.limits.save_s)
                self.auditor.finish()
                self.status.enter("finished")
                self.link.send(self.status.finished())
                self.recovery.stay_as_donor()
        self.phases.gate.close()
        self.link.close()
        self.pulse.close()
        self.groups.shutdown()
        self.timeline.close()

    def failed(self, error: BaseException) -> None:
        """Report that the script ended by `error`, before the process exits."""
        if self._failed or isinstance(error, StepRefused):  # that failure is another rank's
            self._failed = True
            return
        self._failed = True
        text = "".join(traceback.format_exception(error))
        cause: FaultKind = "contract" if isinstance(error, UsageError) else "raised"
        if cause == "raised" and is_caused_by_transport(error):
            cause, text = "transport", ""  # the script could not go on without its peer
        self.status.report_fault(self.fault(cause, f"{type(error).__name__}: {error}"[:2000], text))
