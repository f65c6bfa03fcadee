"""Node of a run of several nodes: an agent, and the controller while this node owns the term."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import traceback
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from outlast import events
from outlast.controller.inputs import EndRun
from outlast.controller.node_placement import RETURN_S
from outlast.errors import EXIT_GAVE_UP, EXIT_INTERRUPTED, OutlastError, RunDirError, StorageError
from outlast.launch.host.agent import Agent
from outlast.launch.host.agent_link import AgentEntry
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.nodes.controller_lock import ControllerLock
from outlast.launch.nodes.controller_tenure import (
    ControllerTenure,
    NodeSetting,
    newest_checkpoint,
)
from outlast.launch.nodes.node_flags import release_code
from outlast.launch.nodes.node_meeting import NodeMeeting, NodeSeat, RunPlace
from outlast.launch.nodes.node_state import StateFile
from outlast.launch.notices import drain_requests, notice_flags
from outlast.launch.run_directory import SAVE_SIGNAL, RunDir
from outlast.launch.run_display import Console, DisplayRecord
from outlast.launch.terms.journal_copies import fetch_journals
from outlast.launch.terms.term_records import TermRecord
from outlast.launch.terms.term_watch import TermNews, TermWatch
from outlast.launch.timed_faults import TimedFaults
from outlast.telemetry.event_store import EventClock
from outlast.text_formatting import resume_hint
from outlast.transport import messages

GRACE_S = 15.0  # beyond `stop_s`: then this node ends without the controller


class NodeEnd(NamedTuple):
    """End of a run on one node. `leads`: this node was its controller's."""

    end: EndRun
    leads: bool


class FirstTerm(NamedTuple):
    """The nodes that wait for the beginning of a run."""

    meeting: NodeMeeting
    seats: list[NodeSeat]


class RunNode:
    """Parts of a running node."""

    def __init__(
        self, node: NodeSetting, run_dir: RunDir, record: DisplayRecord, clock: EventClock
    ) -> None:
        self._run_dir, self._record = run_dir, record
        self._plan, self._host = node.plan, node.host
        self._over: asyncio.Future[EndRun] = asyncio.get_running_loop().create_future()
        self._stops = 0
        self._tenure: ControllerTenure | None = None
        self._leading: asyncio.Task[None] | None = None
        self._saves = False  # SIGUSR1 requests a checkpoint where the controller is
        self._lock: ControllerLock | None = None  # after a takeover
        self._locking: asyncio.Task[None] | None = None
        self._agent: Agent
        become_subreaper()
        self._crew = WorkerPool(
            node.plan, run_dir, node.token, node.host, clock, record.note, node.site
        )
        self._node = node._replace(plan=replace(node.plan, master_port=self._crew.master_port))

    async def lead(self, first: FirstTerm, checkpoint: messages.Checkpointed | None) -> NodeEnd:
        """Run as the first controller's node, until the run ends."""
        tenure = ControllerTenure(self._node, self._run_dir, self._record, checkpoint)
        job = self._run_dir.job
        address, port = self._plan.master_addr, self._crew.master_port
        place = RunPlace(job.run, job.term, tenure.shell.address, address, port, job.home)
        self._crew.keepers.note_placement()
        await first.meeting.accept(first.seats, place, self._node.nonce)
        self._begin_tenure(tenure)
        return await self.follow(tenure.shell.address)

    async def follow(self, controller: tuple[str, int]) -> NodeEnd:
        """Run until the run ends; all started processes are dead when this returns or raises."""
        node = self._node
        entry = AgentEntry(node.incarnation, node.identity.domain, node.tls)
        self._agent = Agent(self._crew, controller, node.token, lambda _worker: None, entry)
        self._agent.on_outcome = self._on_outcome
        console = Console(self._crew, self._record.display)
        serving = [asyncio.create_task(part) for part in (self._agent.run(), self._watch())]
        state = StateFile(self._host, self._run_dir.job.run, self._plan.limits.lease_s)
        faults = TimedFaults(self._crew, self._record)
        silence = state.keep(lambda: self._agent.lease.silence_s)
        showing = [asyncio.create_task(part) for part in (console.run(), silence, faults.run())]
        end = self._interrupted("the node was cancelled")
        try:
            with self._signals():
                await asyncio.wait({*serving, self._over}, return_when=asyncio.FIRST_COMPLETED)
            end = self._over.result() if self._over.done() else EndRun(outcome="", exit_code=0)
            for task in serving:
                if task.done() and not self._over.done():
                    task.result()  # raises its error
        except Exception as error:  # noqa: BLE001 - an error of this node ends it
            end = EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=self._own_fault(error))
        finally:
            self._agent.release_workers()
            for task in (*serving, *showing):
                task.cancel()
            leads = self._tenure is not None and end.outcome != messages.RELEASED
            await self._close(end)
            console.look()
        return NodeEnd(end, leads)

    async def _close(self, end: EndRun) -> None:
        if self._leading:
            self._leading.cancel()
        if end.outcome == messages.RELEASED:
            await self._hand_over()
        if self._tenure:
            self._tenure.shell.announce(end)
        await self._crew.close()
        if self._tenure:
            TimedFaults(self._crew, self._record).note_missed(plain=False)
            await self._tenure.end(end)
        self._release_lock()

    async def _hand_over(self) -> None:
        """Leave the run: take back the requests for that, so that this host is not asked again when
        it has come back, and stop to act as controller, so that another node takes over."""
        try:
            await asyncio.to_thread(drain_requests.withdraw_leaves, self._run_dir.path, self._host)
        except RunDirError as error:
            self._record.note(f"{error}; {self._host} may be asked again to leave")
        tenure, self._tenure = self._tenure, None
        if tenure:
            self._record.note(f"{self._host} leaves the run: another node takes over as controller")
            await tenure.close()

    def _release_lock(self) -> None:
        if self._locking:
            self._locking.cancel()
        if self._lock:
            self._lock.release()
        self._lock = None

    # --- terms ----------------------------------------------------------------------------

    def _begin_tenure(self, tenure: ControllerTenure) -> None:
        self._tenure = tenure
        tenure.shell.on_stop = self._stop_once
        tenure.begin()
        self._leading = asyncio.create_task(self._lead(tenure))

    async def _lead(self, tenure: ControllerTenure) -> None:
        """Wait until the run ends under this controller, or a newer term exists."""
        await asyncio.wait(
            {tenure.shell.ended, tenure.deposed}, return_when=asyncio.FIRST_COMPLETED
        )
        if tenure.deposed.done():
            newer = tenure.deposed.result()
            self._record.note(
                f"{self._host} is no longer the controller: term {newer.term} is of {newer.host}"
            )
            self._tenure = None
            self._release_lock()
            await tenure.close()
            return
        error = tenure.shell.ended.exception()
        if isinstance(error, Exception):
            fault = self._own_fault(error)
            self._end(EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=fault))
        else:
            self._end(tenure.shell.ended.result())

    async def _watch(self) -> None:
        """Follow newer terms, take over where there is no controller, or give up."""
        job = self._run_dir.job
        watch = TermWatch(
            self._node.ledger,
            TermRecord(term=job.term, run=job.run, host=self._host, claim=""),
            self._agent.lease,
            self._node.hosts.index(self._host) / len(self._node.hosts),
            self._record.note,
        )
        limit_s = self._plan.limits.lease_s + RETURN_S
        try:
            while True:
                if news := await watch.wait(1.0):
                    await self._hear(news)
                elif self._agent.lease.silence_s > limit_s:
                    self._give_up(f"no controller has answered for {limit_s:g} s")
        finally:
            watch.close()

    async def _hear(self, news: TermNews) -> None:
        """Take over, follow, or end."""
        if news.beat is None:
            if await self._has_journals(news.term):
                self._take_over(news)
        elif news.beat.outcome:
            self._on_outcome(
                messages.RunOutcome(
                    outcome=news.beat.outcome,
                    exit_code=news.beat.exit_code,
                    cause=news.beat.cause,
                )
            )
        else:
            self._record.note(
                f"{self._host} follows {news.host}, the controller of term {news.term}"
            )
            self._agent.follow(news.term, news.host, news.beat.address)

    async def _has_journals(self, term: int) -> bool:
        """Return whether the journals of all terms before are in this run directory. If not, the
        term that this node has created stays without a controller, and the next one is created."""
        if self._node.journals is None:
            return True
        journal = self._run_dir.room("journal")
        try:
            await asyncio.to_thread(fetch_journals, self._node.journals, term, journal)
        except OutlastError as error:
            self._record.note(
                f"{self._host} has created term {term}, and cannot use it: the journal of earlier"
                f" terms cannot be read: {error}"
            )
            return False
        return True

    def _take_over(self, news: TermNews) -> None:
        """Act as the controller of a term that this node has created."""
        silent_s = self._agent.lease.unheard_s
        self._record.note(
            f"{self._host} takes over as controller, term {news.term}: the one on {news.before} has"
            f" not answered for {silent_s:.1f} s, and its beat stands still"
        )
        self._run_dir.adopt(self._run_dir.job.run, news.term)
        checkpoint = newest_checkpoint(self._run_dir)
        tenure = ControllerTenure(
            self._node,
            self._run_dir,
            self._record,
            checkpoint,
            news.before,
            silent_s,
            news.successors,
        )
        self._begin_tenure(tenure)
        self._lock = ControllerLock(self._run_dir.path)
        self._lock.show(saves=self._saves)
        self._locking = asyncio.create_task(self._lock.keep())
        self._agent.follow(news.term, self._host, tenure.shell.address)

    # --- the end --------------------------------------------------------------------------

    def _on_outcome(self, outcome: messages.RunOutcome) -> None:
        if outcome.outcome == messages.RELEASED:
            detail = (
                f"{self._host} has left the run ({outcome.cause}), which goes on without it; on"
                f" this host 'outlast run --resume {self._run_dir.path}' joins it again"
            )
            fault, code = self._fault("requested", detail), release_code(outcome.exit_code)
            self._end(EndRun(outcome=outcome.outcome, exit_code=code, cause=fault))
        elif self._tenure is None:
            cause = self._fault("requested", outcome.cause) if outcome.cause else None
            self._end(EndRun(outcome=outcome.outcome, exit_code=outcome.exit_code, cause=cause))

    def _give_up(self, why: str) -> None:
        detail = (
            f"{self._host}: {why}; the workers of this node were killed, what was checkpointed is"
            f" kept; on all nodes {resume_hint(str(self._run_dir.path))}"
        )
        self._record.note(detail)
        fault = self._fault("agent_lost", detail)
        self._end(EndRun(outcome="gave_up", exit_code=EXIT_GAVE_UP, cause=fault))

    def _fault(self, kind: events.FaultKind, detail: str) -> events.Fault:
        return events.Fault(kind=kind, detail=detail, host=self._host, t_ns=self._record.now_ns())

    def _own_fault(self, error: Exception) -> events.Fault:
        """Return the fault for an error of this node or its controller."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, OutlastError):
            is_storage = isinstance(error, RunDirError | StorageError)
            return self._fault("storage" if is_storage else "internal", str(error))
        text = (
            f"the launcher of {self._host} itself failed ({type(error).__name__}: {error}); its"
            " workers were stopped, what was committed and checkpointed is kept; please report"
            f" this, and on all nodes {resume_hint(str(self._run_dir.path))}"
        )
        found = "".join(traceback.format_exception(error))
        return replace(self._fault("internal", text), traceback=found)

    def _end(self, end: EndRun) -> None:
        if not self._over.done():
            self._over.set_result(end)

    # --- signals --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = notice_flags.stop_numbers(self._plan.stop_signals)
        for number in numbers:
            loop.add_signal_handler(number, self._request_stop, f"{number.name} to the launcher")
        notices = notice_flags.numbers(self._plan.notices.signals)
        for number in notices:
            loop.add_signal_handler(number, self._on_notice, number)
        numbers = list({*numbers, *notices})
        saves = self._saves = SAVE_SIGNAL not in numbers
        first = self._tenure
        if saves:
            loop.add_signal_handler(SAVE_SIGNAL, self._request_save)
        if saves and first:
            self._run_dir.tell_saves(True)
        try:
            yield
        finally:
            if saves and first and first is self._tenure:
                self._run_dir.tell_saves(False)
            if self._lock:
                self._lock.show(saves=False)
            if saves:
                loop.remove_signal_handler(SAVE_SIGNAL)
                signal.signal(SAVE_SIGNAL, signal.SIG_IGN)  # as it was before the loop
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_notice(self, number: signal.Signals) -> None:
        """Take the first such signal as a notice; those after it as they are without the flag."""
        is_notice = self._agent.notices.take_signal(number.name, f"the launcher of {self._host}")
        if not is_notice and number.name in self._plan.stop_signals:
            self._request_stop(f"{number.name} to the launcher")

    def _request_save(self) -> None:
        if self._tenure:  # a scheduler may signal all nodes: the others ignore it
            self._tenure.shell.save("SIGUSR1 to the launcher")

    def _stop_once(self, reason: str) -> None:
        """Drain at the request of another node; a scheduler sends its signal to all of them."""
        if not self._stops:
            self._request_stop(reason)

    def _request_stop(self, reason: str) -> None:
        """Drain at the first request; at the second one kill all, or end a node that does not hold
        the controller; end at the third."""
        self._stops += 1
        if self._stops == 1:
            self._record.note(f"{reason}: stopping; once more to stop at once")
            loop = asyncio.get_running_loop()
            loop.call_later(self._plan.limits.stop_s + GRACE_S, self._give_in, reason)
        if self._stops > 2 or (self._stops == 2 and self._tenure is None):
            self._give_in(reason)
        elif self._tenure:
            self._tenure.shell.stop(reason)
        else:
            self._agent.request_stop(reason)

    def _give_in(self, reason: str) -> None:
        self._end(self._interrupted(reason))

    def _interrupted(self, reason: str) -> EndRun:
        fault = self._fault("requested", f"{reason} ({self._host})")
        return EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=fault)
