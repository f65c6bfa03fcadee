"""Worker processes of one host: start, signals and reaping."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from outlast import config
from outlast.launch.host.keeper_pool import ONE_HOST, KeeperPool, KeeperSite, ReplicaPlan
from outlast.launch.host.partner_pages import PartnerPages
from outlast.launch.host.worker_environment import (
    ERROR_FILE_NAME,
    ErrorFile,
    free_port,
    read_error_file,
    worker_environment,
)
from outlast.launch.host.worker_family import (
    ProcessIdentity,
    ReaperHandle,
    WorkerFamily,
    oom_kills,
    spawn,
)
from outlast.launch.host.worker_template import WorkerTemplate
from outlast.launch.run_directory import RunDir
from outlast.launch.torchrun.worker_commands import names_outlast, with_local_rank
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.event_store import EventClock
from outlast.transport import messages
from outlast.transport.channel import Channel
from outlast.transport.rendezvous_messages import HostMeetings
from outlast.transport.worker_page import Beat, OwnTimeRecord, Page

_STARTED_MAX = 4096
HELD_S = 1.0  # several pulse periods
Left = TypeVar("Left")


class WorkerPost(NamedTuple):
    """Start parameters of a worker."""

    name: str
    seat: int  # -1 for a spare
    agent: str
    incarnation: int
    restart_count: int
    joins: bool = False  # the job runs already


class WorkerOutcome(NamedTuple):
    """Outcome of a worker whose whole family is dead and reaped."""

    exit_code: int  # negative for a signal
    beat: Beat | None  # None if its page cannot be read
    slots: dict[str, bytes]
    stderr_tail: str
    error_file: ErrorFile | None = None


class WorkerHandle:
    """Live worker; `on_frame` and `on_exit` may be replaced by a new owner."""

    def __init__(self, post: WorkerPost, local_rank: int) -> None:
        self.name = post.name
        self.seat = post.seat
        self.is_unseated = True  # neither Seat nor Prepare was passed on: any term can seat it
        self.stages: tuple[int, ...] = ()  # of a pipeline, that the worker has reported
        self.local_rank = local_rank
        self.started_ns = time.monotonic_ns()
        self.oom_kills = oom_kills()  # before it
        self.kill_reason = ""
        self.own_times = 0  # records of its own time that were reported
        # The newest of each kind that a later controller has to receive again.
        self.reports: dict[type[messages.AnyBody], messages.MessageEnvelope] = {}
        self.reaping: asyncio.Task[WorkerOutcome] | None = None
        self.page: Page
        self.process: WorkerFamily
        self.channel: Channel
        self.on_frame: Callable[[WorkerHandle, messages.MessageEnvelope], None] = (
            lambda _worker, _frame: None
        )
        self.on_exit: Callable[[WorkerHandle], None] = lambda _worker: None


class WorkerPool:
    """Workers of this host by name, from their start until they are reaped."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        token: bytes,
        host: str,
        clock: EventClock,
        note: Callable[[str], None],
        site: KeeperSite = ONE_HOST,
    ) -> None:
        self.clock = clock  # shared by all processes of this host
        self.note = note  # writes a note to the run's events
        self.plan, self.run_dir, self.host = plan, run_dir, host
        self.workers: dict[str, WorkerHandle] = {}
        self.meetings = HostMeetings()
        self.partner_pages = PartnerPages(2 * plan.ranks_per_node if plan.node.total > 1 else 0)
        self.devices = 0  # GPUs visible to a worker; 0 until reported
        self.unwell: set[int] = set()  # local ranks whose device has findings
        self.started: deque[WorkerHandle] = deque(
            maxlen=_STARTED_MAX
        )  # for the display, which follows their logs
        self._token = token
        self._mark = worker_mark(token)
        self.master_port = plan.master_port or free_port(plan.master_addr)
        self.leaders: set[int] = set()  # pids reaped by their owners
        self._reaper = ReaperHandle(f"{self._mark}:", run_dir.lock_fds, self.leaders, note)
        self.template = WorkerTemplate(plan, run_dir, self._mark, self.leaders, self._reaper, note)
        self._keepers_prefix = f"@outlast-{self._mark}-"
        self.keepers = KeeperPool(
            self._keepers_prefix,
            token.hex(),
            run_dir.lock_fds,
            self.leaders,
            note,
            ReplicaPlan.of(plan, run_dir.path.absolute(), host, site),
        )

    def names_outlast(self) -> bool:
        """Return whether the script's text contains "outlast"; otherwise no Hello is expected."""
        return bool(names_outlast(self.plan.command))

    def start(self, post: WorkerPost) -> WorkerHandle:
        """Start one worker: a fork of the template if one can be claimed.

        Raises OSError or ConfigError on failure.
        """
        worker = WorkerHandle(post, self._free_local_rank(post.seat))
        if self.plan.node.is_several and post.seat >= 0:
            worker.local_rank = post.seat % self.plan.ranks_per_node
        page = Page.create()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = self._family(worker, post, theirs.fileno(), page.fd)
        except BaseException:
            ours.close()
            page.close()
            raise
        self._reaper.add(process.pid)
        worker.page, worker.process = page, process
        worker.channel = Channel(
            ours, self._token, lambda frame: worker.on_frame(worker, frame), lambda _reason: None
        )
        self.workers[post.name] = worker
        self.started.append(worker)
        return worker

    def _family(
        self, worker: WorkerHandle, post: WorkerPost, control_fd: int, page_fd: int
    ) -> WorkerFamily:
        """Fork the worker's process, or spawn it."""
        log_dir = self.run_dir.log_dir(post.seat, post.name)
        mark = f"{self._mark}:{post.name};"

        def identity(fds: tuple[int, int]) -> ProcessIdentity:
            environment = worker_environment(
                self.plan,
                self._settings(post, *fds),
                mark,
                worker.local_rank,
                self.master_port,
                post.restart_count,
                str(log_dir / ERROR_FILE_NAME),
            )
            return ProcessIdentity(post.name, mark, environment, log_dir, control_fd, page_fd)

        child = self.template.claim(identity(fds)) if (fds := self.template.fds) else None
        born = identity((control_fd, page_fd))
        child = child or spawn(with_local_rank(self.plan.command, worker.local_rank), born)
        return WorkerFamily(child, born, self.leaders, lambda: worker.on_exit(worker))

    def _settings(self, post: WorkerPost, control_fd: int, page_fd: int) -> config.WorkerSettings:
        job = self.run_dir.job
        return config.WorkerSettings(
            run=job.run,
            token=self._token.hex(),
            term=job.term,
            agent=post.agent,
            incarnation=post.incarnation,
            worker=post.name,
            seat=post.seat,
            joins=post.joins,
            world=self.plan.world,
            ranks_per_node=self.plan.ranks_per_node,
            control_fd=control_fd,
            page_fd=page_fd,
            run_dir=str(self.run_dir.path.absolute()),
            checkpoints=str(self.run_dir.checkpoints.absolute()),
            checkpoint_every=self.plan.checkpoint_every,
            snapshot_every=self.plan.snapshot_every,
            audit_every=self.plan.audit_every,
            replay_every=self.plan.replay_every,
            until_step=self.plan.until_step,
            keepers=self._keepers_prefix,
            shares_keepers=self.plan.node.total > 1 and self.plan.keeps_copies,
            on_unrepeatable=self.plan.on_unrepeatable,
            nan=self.plan.nan,
            may_shrink=self.plan.policy.shrinks,
            notice_signals=self.plan.notices.signals,
            faults=self.plan.faults,
            fault_seed=self.plan.fault_seed,
            clock_anchor_ns=self.clock.anchor_ns,
            limits=self.plan.limits,
        )

    def _free_local_rank(self, seat: int) -> int:
        """Return the local rank of a new worker, below world + spares.

        A seat prefers its own number, then the lowest free number; spares use the seats' numbers
        last. Devices with findings are avoided. If none is free, a number is shared.
        """
        world, total = self.plan.world, self.plan.world + self.plan.spares
        taken = {worker.local_rank for worker in self.workers.values()}
        seated = [seat, *range(total)]
        numbers = seated if seat >= 0 else [*range(world, total), *range(world)]
        free = [number for number in numbers if number not in taken]
        return next((number for number in free if number not in self.unwell), (free or numbers)[0])

    def device_for(self, worker: WorkerHandle, seat: int) -> int:
        """Return the local rank of a spare that takes a seat; with several nodes, that of the seat.

        A spare started without its own GPU gets the first free GPU below the world size, preferably
        without findings.
        """
        if self.plan.node.is_several:
            worker.local_rank = seat % self.plan.ranks_per_node
        elif worker.local_rank >= max(self.devices, self.plan.world) or self.devices == 0:
            taken = {other.local_rank for other in self.workers.values() if other is not worker}
            free = [number for number in range(self.plan.world) if number not in taken]
            well = [number for number in free if number not in self.unwell]
            worker.local_rank = (well or free or [worker.local_rank])[0]
        return worker.local_rank

    def blocked_interpreters(self) -> tuple[str, ...]:
        """Return the seated workers without a pulse that the kernel has not stopped.

        A C extension holds the interpreter lock of such a worker and blocks its pulse thread.
        """
        late_ns = time.monotonic_ns() - int(HELD_S * 1e9)
        return tuple(
            name
            for name, worker in self.workers.items()
            if worker.reaping is None
            and worker.seat >= 0
            and 0 < worker.page.pulse().t_ns < late_ns
            and worker.process.state not in "TtZX"
        )

    def kill(self, worker: WorkerHandle, reason: str) -> None:
        """Send SIGKILL; `on_exit` follows. Only the first reason is reported."""
        worker.kill_reason = worker.kill_reason or reason
        worker.process.send_signal(signal.SIGKILL)

    def hold_until(self, end_ns: int) -> None:
        """Let workers of several nodes apply no vote after the end of this host's lease."""
        if self.plan.node.total > 1:
            for worker in self.workers.values():
                if worker.reaping is None:
                    worker.page.put_lease(end_ns)

    def stop_running(self) -> list[WorkerHandle]:
        """Send SIGSTOP to the main process of each worker that is not stopped; return these."""
        running = [one for one in self.workers.values() if one.process.state not in "TtZX"]
        for worker in running:
            worker.process.send_signal(signal.SIGSTOP)
        return running

    def continue_running(self, stopped: list[WorkerHandle]) -> None:
        """Let workers run on that `stop_running` has stopped, and empty the list."""
        for worker in stopped:
            if not worker.kill_reason:
                worker.process.send_signal(signal.SIGCONT)
        stopped.clear()

    def beats(self) -> dict[str, tuple[int, int, str, float]]:
        """Return (n, step, state, loss) of each worker that is not being reaped."""
        running = (worker for worker in self.workers.values() if worker.reaping is None)
        pages = ((worker.name, worker.page.read()) for worker in running)
        return {name: (beat.n, beat.step, beat.state, beat.loss) for name, beat in pages}

    def renewal(self, answers: int) -> messages.Renew:
        """Return the agent's renewal, with all that its workers' pages have to report."""
        return messages.Renew(
            answers=answers,
            beats=self.beats(),
            blocked=self.blocked_interpreters(),
            own_times=self._new_own_times(),
        )

    def _new_own_times(self) -> dict[str, tuple[OwnTimeRecord, ...]]:
        """Return the records of own time of each rank since the last call."""
        found: dict[str, tuple[OwnTimeRecord, ...]] = {}
        for name, worker in self.workers.items():
            if worker.reaping is None and worker.seat >= 0:
                worker.own_times, records = worker.page.own_times(worker.own_times)
                if records:
                    found[name] = tuple(records)
        return found

    def meet(
        self,
        worker: WorkerHandle,
        meet: messages.Meet,
        answer: Callable[[WorkerHandle, messages.Met], object],
    ) -> messages.HostMeets | None:
        """Return what this host's ranks have for a group, once all of them have come. A group
        without ranks on other hosts gets its answer here."""
        met = self.meetings.add(worker.seat, meet)
        if not isinstance(met, messages.Met):
            return met
        for one in self.workers.values():
            if one.seat in met.parts:
                answer(one, met)
        return None

    def ask_to_end(self, number: signal.Signals) -> None:
        """Send a signal to every main process."""
        for worker in self.workers.values():
            worker.process.send_signal(number)

    async def reap(self, worker: WorkerHandle) -> WorkerOutcome:
        """Kill and reap the whole family, return its outcome, and remove the worker.

        Raises TimeoutError if a process survives SIGKILL; the worker then stays listed, and the
        next call retries. Unreadable parts of the outcome are noted.
        """
        if worker.reaping is None or (worker.reaping.done() and worker.reaping.exception()):
            worker.reaping = asyncio.create_task(self._reap_one(worker))
        return await asyncio.shield(worker.reaping)

    async def _reap_one(self, worker: WorkerHandle) -> WorkerOutcome:
        exit_code = await worker.process.reap()
        self._try(worker, worker.channel.read_rest, None)
        worker.channel.close()
        outcome = WorkerOutcome(
            exit_code,
            self._try(worker, worker.page.read, None),
            self._try(worker, worker.page.slots, {}),
            worker.process.stderr_tail(),
            read_error_file(worker.process.log_dir / ERROR_FILE_NAME),
        )
        self.partner_pages.keep(worker.page)
        self._reaper.remove(worker.process.pid)
        self.workers.pop(worker.name, None)
        return outcome

    def _try(self, worker: WorkerHandle, read: Callable[[], Left], error_text: Left) -> Left:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - a damaged page must not hide the worker's death
            self.note(
                f"{read.__name__} of dead worker {worker.name} failed"
                f" ({type(error).__name__}: {error}); its loss is reported without it"
            )
            return error_text

    async def kill_all(self, reason: str) -> None:
        """Kill and reap all workers; raises TimeoutError as `reap` does."""
        workers = list(self.workers.values())
        for worker in workers:
            worker.on_exit = lambda _worker: None
            self.kill(worker, reason)
        for end in await asyncio.gather(*map(self.reap, workers), return_exceptions=True):
            if isinstance(end, BaseException):
                raise end

    async def close(self) -> None:
        """Kill and reap all workers; note surviving processes."""
        try:
            await self.kill_all("the launcher ends")
        except (TimeoutError, OSError) as error:
            self.note(f"{error}; the reaper tries once more, and waits longer")
        self.template.close()
        await self.keepers.close(self.plan.limits.stop_s)
        self._reaper.dismiss()


def worker_mark(token: bytes) -> str:
    """Return the family mark of a run's processes, derived from the token without revealing it."""
    return hashlib.blake2b(token, digest_size=8).hexdigest()
