"""Launcher of one run: starts and stops all parts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast import events
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.controller.inputs import EndRun
from outlast.errors import (
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    ConfigError,
    OutlastError,
    RunDirError,
    StorageError,
)
from outlast.launch import preflight, run_directory, start_point, torchrun_arguments
from outlast.launch.checkpoint_upkeep import CheckpointUpkeep
from outlast.launch.controller_shell import ControllerShell
from outlast.launch.host.agent import Agent
from outlast.launch.host.check_runner import remaining_findings
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerHandle, WorkerPool
from outlast.launch.nodes.node_state import StateFile
from outlast.launch.notices import notice_flags
from outlast.launch.run_directory import SAVE_SIGNAL, RunDir
from outlast.launch.run_display import Console, Display, DisplayRecord
from outlast.launch.run_journal import bars_of
from outlast.launch.start_point import CheckpointSearch
from outlast.launch.timed_faults import TimedFaults
from outlast.launch.torchrun.group_hosts import GroupHosts
from outlast.launch.torchrun.host_ranks import HostRanks
from outlast.launch.torchrun.rank_store import RankStore
from outlast.launch.torchrun.standstill_monitor import StandstillMonitor
from outlast.launch.torchrun.unmanaged_group import UnmanagedGroup
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock, EventWriter
from outlast.transport import messages

GRACE_S = 15.0  # beyond `stop_s`: then the launcher ends without the controller


def launch(plan: RunPlan, show: Callable[[Path], Display]) -> tuple[EndRun, Path]:
    """Run the plan; return the end of the run and the run directory.

    `show` opens the display of a run directory after it is locked. Raises ConfigError, RunDirError
    or StorageError before anything is started. A later error of the launcher or its controller
    becomes the cause of a run with outcome gave_up; no process is left alive.
    """
    with run_directory.ignore_save_signal():
        return _launch(plan, show)


def _launch(plan: RunPlan, show: Callable[[Path], Display]) -> tuple[EndRun, Path]:
    durable = preflight.check(plan)
    run_dir = run_directory.take(Path(plan.run_dir), plan.script, plan.args, plan.world)
    try:
        _refuse_hosts(run_dir)
        run_directory.place_logs(run_dir, plan.log_dir, plan.run_id)
        torchrun_arguments.store_plan(run_dir, plan)
        clock = EventClock()
        writer = EventWriter(run_dir.room("events"), f"launcher{run_dir.job.term:06d}", clock)
        record = DisplayRecord(writer, show(run_dir.path))
        try:
            end = asyncio.run(_Launcher(plan, run_dir, record, clock, durable).run())
        finally:
            record.close()
    finally:
        run_dir.release()
    return end, run_dir.path


def _refuse_hosts(run_dir: RunDir) -> None:
    """Raise RunDirError for the directory of one of several hosts that had their own."""
    if run_dir.job.home:
        raise RunDirError(
            f"run directory {run_dir.path} is of one of several hosts, each with its own, and the"
            f" checkpoints are in {run_dir.job.home}; nothing was started; give the same --nnodes"
            f" as before, or a fresh --run-dir with --durable {run_dir.job.home}"
        )


class _Launcher:
    """Parts of a running launcher."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        record: DisplayRecord,
        clock: EventClock,
        durable: list[DurableTarget],
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._record, self._clock = record, clock
        self._durable = durable
        self._stops = 0
        self._unmanaged: UnmanagedGroup | None = None
        self._ranks: HostRanks | None = None  # of the unmanaged group
        self._hosts: GroupHosts | None = None
        self._store: RankStore | None = None
        self._over: asyncio.Future[EndRun]
        self._took_over: asyncio.Event
        self._controller: ControllerShell
        self._agent: Agent
        self._crew: WorkerPool

    async def run(self) -> EndRun:
        """Run the job; RunStarted is always followed by RunEnded, with the cause of the end."""
        stores = [target.store for target in self._durable]
        try:
            bars = bars_of(self._run_dir.path)
        except RunDirError:
            bars = ()  # the controller reads the same journal and reports the error
        checkpoint, notes = start_point.begin(self._run_dir, stores, self._show, bars)
        self._record.run_started(self._plan, self._run_dir, checkpoint, notes)
        end = self._interrupted("the launcher was cancelled")
        try:
            end = await self._play(checkpoint)
        except Exception as error:  # noqa: BLE001 - a launcher error ends the run
            end = EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=self._own_fault(error))
        finally:
            self._record.run_ended(end)
        return end

    def _show(self, text: str) -> None:
        """Display a note before this launcher's first event."""
        note = events.Note(t_ns=self._record.now_ns(), worker="", seat=-1, text=text)
        self._record.display.event(note)

    async def _play(self, checkpoint: messages.Checkpointed | None) -> EndRun:
        """Run the job; all started processes are dead when this returns or raises."""
        plan, record = self._plan, self._record
        token = secrets.token_bytes(32)
        become_subreaper()
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._took_over = asyncio.Event()
        self._crew = WorkerPool(
            plan, self._run_dir, token, socket.gethostname(), self._clock, record.note
        )
        console = Console(self._crew, record.display)
        strikes = TimedFaults(self._crew, record)
        root = self._run_dir.room("checkpoints")
        upkeep = CheckpointUpkeep(root, plan.keep, self._durable, record, self._is_barred)
        done = False
        standstill = StandstillMonitor(
            self._crew, record.note, self._end_standstill, lambda: not self._agent.said_hello
        )
        parts = (console, strikes, standstill)
        helpers = [asyncio.create_task(part.run()) for part in parts]
        if plan.agent_store:
            self._store = RankStore(self._crew.leaders)
            self._store.on_end = self._lose_store
            helpers.append(asyncio.create_task(self._open_store(self._store)))
        with self._signals(loop):
            try:
                origins = CheckpointSearch(
                    root,
                    self._run_dir.job.run,
                    self._crew.keepers.addresses(plan.world),
                    token.hex(),
                    [target.store for target in self._durable],
                )
                self._controller = ControllerShell(
                    plan,
                    self._run_dir,
                    token,
                    record,
                    checkpoint,
                    origins,
                    upkeep.committed,
                )
                if plan.migrate_on:
                    self._crew.unwell = remaining_findings(
                        self._controller.earlier, self._crew.host
                    )
                self._agent = Agent(self._crew, self._controller.address, token, self._take_over)
                state = StateFile(self._crew.host, self._run_dir.job.run, plan.limits.lease_s)
                silence = state.keep(lambda: self._agent.lease.silence_s)
                helpers.append(asyncio.create_task(silence))
                end = await self._lead()
                done = end.outcome == "done"
                return end
            finally:
                for helper in helpers:
                    helper.cancel()
                if self._hosts:
                    self._hosts.close()
                if self._store:
                    self._store.close()
                await self._crew.close()
                patience_s = plan.limits.save_s if done else plan.limits.stop_s
                await upkeep.close(patience_s, self._over, done=done)
                console.look()
                strikes.note_missed(plain=self._unmanaged is not None)

    def _lose_store(self, fault: events.Fault) -> None:
        """Let the group of an unmanaged script fail; a session does not use the store."""
        if not self._agent.said_hello:
            self._take_over()
        if self._hosts:
            self._hosts.fail(fault)

    async def _open_store(self, store: RankStore) -> None:
        """Open the store of the first attempt, beside the start of its ranks."""
        try:
            await store.open(self._crew.master_port)
        except ConfigError as error:
            self._over.set_result(
                EndRun(outcome="gave_up", exit_code=EXIT_USER_ERROR, cause=self._own_fault(error))
            )

    def _is_barred(self, place: SavePoint) -> bool:
        """Return whether an audit has barred a checkpoint."""
        return self._controller.is_barred(place)

    def _own_fault(self, error: Exception) -> events.Fault:
        """Return the fault for an error of the launcher itself."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        known = isinstance(error, OutlastError)
        return events.Fault(
            kind="storage" if isinstance(error, RunDirError | StorageError) else "internal",
            detail=str(error)
            if known
            else f"the launcher itself failed ({type(error).__name__}: {error}); all workers were"
            " stopped, what was committed and checkpointed is kept; please report this, and resume"
            f" with: outlast run --run-dir {self._run_dir.path} ...",
            traceback="" if known else "".join(traceback.format_exception(error)),
            host=socket.gethostname(),
            t_ns=self._record.now_ns(),
        )

    async def _lead(self) -> EndRun:
        """Run under the controller, or as an unmanaged group if the script calls no `init()`."""
        self._controller.begin()
        serving = asyncio.create_task(self._agent.run())
        took_over = asyncio.create_task(self._took_over.wait())
        waiting = {self._controller.ended, self._over, serving, took_over}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            took_over.cancel()
            serving.cancel()
            self._controller.close()
        if self._over.done():
            return self._over.result()
        if self._unmanaged:
            group = asyncio.create_task(self._unmanaged.run())
            await asyncio.wait({group, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                group.cancel()
                return self._over.result()
            return group.result()
        if serving.done() and not self._controller.ended.done():
            serving.result()  # raises the agent's error
        return self._controller.ended.result()

    def _take_over(self, exited: WorkerHandle | None = None) -> None:
        if self._ranks is None:
            self._agent.release_workers()
            plan, crew = self._plan, self._crew
            self._ranks = HostRanks(crew, self._record, self._call_mixed)
            self._hosts = GroupHosts(self._ranks, self._store, plan.master_addr, plan.master_port)
            self._hosts.adopt()
            self._unmanaged = UnmanagedGroup(plan, self._run_dir, self._hosts, self._record)
            self._took_over.set()
        if exited:
            self._ranks.exited(exited)

    def _call_mixed(self, worker: WorkerHandle) -> None:
        """End the run because a worker called `init()` after another one had ended without."""
        fault = events.Fault(
            kind="exited",
            detail=(
                f"rank {worker.seat} called outlast.init() after another rank had ended without:"
                " all ranks must call it, or none; everything was stopped"
            ),
            worker=worker.name,
            seat=worker.seat,
            host=self._crew.host,
            t_ns=self._record.now_ns(),
        )
        if self._unmanaged:
            self._unmanaged.end_mixed(fault)

    def _end_standstill(self, reason: str) -> bool:
        if not self._plan.max_restarts:
            return False
        self._take_over()
        return self._unmanaged is not None and self._unmanaged.give_up(reason)

    # --- signals --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        numbers = notice_flags.stop_numbers(self._plan.stop_signals)
        for number in numbers:
            loop.add_signal_handler(number, self._on_request, number)
        notices = notice_flags.numbers(self._plan.notices.signals)
        for number in notices:
            loop.add_signal_handler(number, self._on_notice, number)
        numbers = list({*numbers, *notices})
        saves = SAVE_SIGNAL not in numbers  # torchrun's flags may use it as a stop signal
        if saves:
            loop.add_signal_handler(SAVE_SIGNAL, self._asked_to_save)
            self._run_dir.tell_saves(True)
        try:
            yield
        finally:
            self._run_dir.tell_saves(False)
            for number in (*numbers, *([SAVE_SIGNAL] if saves else [])):
                loop.remove_signal_handler(number)
            if saves:
                signal.signal(SAVE_SIGNAL, signal.SIG_IGN)  # as it was before the loop

    def _on_notice(self, number: signal.Signals) -> None:
        """Take the first such signal as a notice; those after it as they are without the flag."""
        is_managed = self._unmanaged is None and self._agent.said_hello
        if is_managed and self._agent.notices.take_signal(number.name, "the launcher"):
            return
        if number.name in self._plan.stop_signals:
            self._on_request(number)

    def _asked_to_save(self) -> None:
        """Save a checkpoint now, on request of a scheduler or `outlast ckpt now`."""
        if self._unmanaged is None and self._agent.said_hello:
            self._controller.save("SIGUSR1 to the launcher")
        else:
            self._record.note(run_directory.SAVE_REFUSED)

    def _on_request(self, number: signal.Signals) -> None:
        """Drain at the first signal, kill at the second, skip the controller at the third."""
        reason = f"{number.name} to the launcher"
        self._stops += 1
        if self._stops == 1:
            self._record.note(f"{reason}: stopping; once more to stop at once")
            loop = asyncio.get_running_loop()
            loop.call_later(self._plan.limits.stop_s + GRACE_S, self._give_in, reason)
        else:
            self._record.note(f"{reason}, again: everything is killed")
        if not self._agent.said_hello:
            self._take_over()
        if self._unmanaged is None:
            self._controller.stop(reason)
            if self._stops > 2:
                self._give_in(reason)
        elif self._stops == 1:
            self._unmanaged.stop(number)
        else:
            self._give_in(reason)

    def _give_in(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(self._interrupted(reason))

    def _interrupted(self, reason: str) -> EndRun:
        cause = events.Fault(kind="requested", detail=reason, t_ns=self._record.now_ns())
        return EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=cause)
