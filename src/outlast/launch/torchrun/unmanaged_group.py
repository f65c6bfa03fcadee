"""Worker groups whose script does not call ``outlast.init()``, restarted together as by torchrun.

Outlast has no steps or state of such a script. It reports the root cause of failures, restarts
the group at most ``--max-restarts`` times if a restart can help and the policy recovers from that
class of failure, and reports hangs.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Sequence
from typing import Protocol

from outlast import events
from outlast.config import torchrun_variable
from outlast.controller.inputs import EndRun
from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, EXIT_INTERRUPTED, EXIT_USER_ERROR
from outlast.launch.run_directory import RunDir
from outlast.launch.run_display import DisplayRecord
from outlast.launch.torchrun.attempt_files import pass_on_error
from outlast.launch.torchrun.crash_loop import CrashLoopGuard
from outlast.launch.torchrun_arguments import RunPlan
from outlast.text_formatting import plural
from outlast.transport.connection_errors import is_connection_failure

ECHO_WAIT_S = 5.0  # wait for the root cause after a connection failure
_DONE = EndRun(outcome="done", exit_code=EXIT_DONE)
# Last stderr line of failures that every restart on this host would repeat.
_FAILS_AGAIN = re.compile(
    r"^(?:\[rank\d+\]: *)?(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)"
    r"(?::|$)"
    r"|can't open file '.*': \[Errno 2\]"
)


class GroupRanks(Protocol):
    """Ranks of a group, on one host or several, which start and end together."""

    started_s: float  # time.monotonic() of the current attempt's start

    async def start(self, attempt: int) -> events.Fault | None:
        """Start all ranks; return a fault if that fails."""
        ...

    async def next_failure(self) -> events.Fault | None:
        """Return the next failure, or None once all ranks have ended; it may be cancelled."""
        ...

    async def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, and SIGKILL after ``stop_s``; return when all are dead."""
        ...

    def end_hang(self, reason: str) -> bool:
        """End the attempt of a group that hangs; return False if no rank runs."""
        ...

    def losses(self) -> list[events.Fault]:
        """Return the losses of hosts without a node in their place."""
        ...

    async def replace_lost(self) -> str:
        """Wait for nodes in place of lost ones; return why the ranks cannot be started again, "" if
        they can. It may be cancelled."""
        ...


class UnmanagedGroup:
    """Group of workers that have not called ``outlast.init()``.

    The run is done when all workers exit with 0. After a failure the others get SIGTERM, and
    SIGKILL after ``stop_s``; then all are restarted, at most ``max_restarts`` times. Errors that a
    restart would repeat (failed imports, syntax errors) end the run. Each failure is an incident
    in the events.
    """

    def __init__(
        self, plan: RunPlan, run_dir: RunDir, ranks: GroupRanks, record: DisplayRecord
    ) -> None:
        self._plan, self._run_dir, self._ranks = plan, run_dir, ranks
        self._record = record
        self._restarts = 0
        self._signal: signal.Signals | None = None  # that ends the run
        self._reason = ""  # of the signal
        self._mixed: events.Fault | None = None  # a worker called init()
        self._stop = asyncio.Event()
        record.emit(events.ScriptUnmanaged(t_ns=record.now_ns()))
        self._crash_loop = CrashLoopGuard(plan.limits.attempts_max)

    def stop(self, number: signal.Signals, reason: str = "") -> None:
        """End all workers by the launcher's signal; the script itself must be able to resume."""
        self._signal, self._reason = number, reason
        self._stop.set()

    def end_mixed(self, fault: events.Fault) -> None:
        """End the run because a worker has called ``outlast.init()``."""
        self._mixed = self._mixed or fault
        self._stop.set()

    async def run(self, *, is_started: bool = True) -> EndRun:
        """Run and restart the group; return the end of the run, after all workers are dead."""
        failed = None if is_started else await self._ranks.start(0)
        while not failed:
            faults = await self._one_attempt()
            cause = root_cause(faults)
            if self._signal:
                return self._interrupted(cause)
            if cause is None:
                return _end_of_mixed(self._mixed) if self._mixed else _DONE
            if why := self._why_stop(cause):
                return self._stopped(cause, why)
            if why := await self._replace_lost():
                return self._stopped(cause, why, is_lost=True)
            if self._signal:
                return self._interrupted(cause)
            self._restarts += 1
            why = f"restart {self._restarts} of {self._plan.max_restarts}"
            who = f" (rank {cause.seat})" if cause.seat >= 0 else ""
            self._record.note(f"{why}: {cause.detail}{who}")
            self._decide("relaunch", why)
            if failed := await self._ranks.start(self._restarts):
                break
            self._record.emit(
                events.GenerationOpened(
                    t_ns=self._record.now_ns(),
                    incident=self._restarts,
                    generation=self._restarts + 1,
                    n=0,
                )
            )
        await self._ranks.end(signal.SIGTERM)
        return EndRun(outcome="gave_up", exit_code=EXIT_USER_ERROR, cause=failed)

    async def _replace_lost(self) -> str:
        """Wait for nodes in place of lost ones, until a signal; return why there are none."""
        replaced = asyncio.create_task(self._ranks.replace_lost())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({replaced, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            replaced.cancel()
            stopped.cancel()
        return replaced.result() if replaced.done() and not self._signal else ""

    @property
    def has_restarts(self) -> bool:
        """Return whether a restart is left."""
        return self._restarts < self._plan.max_restarts

    def give_up(self, reason: str) -> bool:
        """End the current attempt of a hung group; return False if no restart is left."""
        return self.has_restarts and self._ranks.end_hang(reason)

    def _interrupted(self, cause: events.Fault | None) -> EndRun:
        if cause is None and self._reason:
            t_ns = self._record.now_ns()
            cause = events.Fault(kind="requested", detail=self._reason, t_ns=t_ns)
        return EndRun(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=cause)

    def _stopped(self, cause: events.Fault, why: str, *, is_lost: bool = False) -> EndRun:
        self._decide("stop", why)
        self._pass_on(cause)
        is_lost = is_lost or cause.kind == "agent_lost"
        return EndRun(
            outcome="gave_up" if is_lost else "user_error",
            exit_code=EXIT_GAVE_UP if is_lost else EXIT_USER_ERROR,
            cause=cause,
            decision=f"stop: {why}",
        )

    def _why_stop(self, cause: events.Fault) -> str:
        """Return the reason not to restart the group, or "" to restart it."""
        if self._mixed:
            return "some ranks called outlast.init() and others ended without"
        if cause.kind == "mismatch":
            return "a restart would fail in the same way"
        restarts_left = self._plan.max_restarts - self._restarts
        unused = f"; {plural(restarts_left, 'restart')} left unused" if restarts_left else ""
        if _FAILS_AGAIN.search(_last_line(cause.traceback)):
            return f"a restart would fail in the same way{unused}"
        lived_s = time.monotonic() - self._ranks.started_s
        if cause.kind != "agent_lost" and (loop := self._crash_loop.objection(cause, lived_s)):
            return f"{loop}{unused}"
        policy = self._plan.policy
        failure = policy.failure_class(cause)
        if failure != "request" and policy.rules(failure)[0].rung == "stop":
            return f"policy {policy.name} does not recover from the class {failure}"
        if not self.has_restarts:
            return f"no restart is left (--max-restarts {self._plan.max_restarts})"
        return ""

    def _decide(self, rung: str, reason: str) -> None:
        self._record.emit(
            events.Decided(
                t_ns=self._record.now_ns(),
                incident=self._restarts + (rung == "stop"),
                generation=self._restarts + (rung == "stop") + 1,
                verdict="redo",
                rung=rung,
                n=0,
                step=0,
                replaced=(),
                reason=reason,
            )
        )

    async def _one_attempt(self) -> list[events.Fault]:
        """Return the failures of one attempt in order, after all workers are dead.

        A failure takes precedence over a stop: it may be the cause of the stop.
        """
        stopped = asyncio.create_task(self._stop.wait())
        failure = asyncio.create_task(self._ranks.next_failure())
        try:
            await asyncio.wait({stopped, failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            failure.cancel()
        if failure.done():
            fault = failure.result()
            return await self._failed(fault) if fault else []
        await self._ranks.end(self._signal or signal.SIGTERM)
        return []

    async def _failed(self, fault: events.Fault) -> list[events.Fault]:
        """End the group after its first failure; return the failures that this did not cause.

        If the first failure is a broken connection, wait up to ECHO_WAIT_S for the rank that caused
        it: interpreters take different times to exit.
        """
        faults = [fault]
        self._notice(fault)
        deadline_s = time.monotonic() + ECHO_WAIT_S
        while _is_echo(faults[-1]) and not self._signal:
            rest_s = max(0.0, deadline_s - time.monotonic())
            try:
                later = await asyncio.wait_for(self._ranks.next_failure(), rest_s)
            except TimeoutError:
                break
            if later is None:
                break
            faults.append(later)
            self._notice(later)
        await self._ranks.end(self._signal or signal.SIGTERM)
        if all(map(_is_echo, faults)):  # of the loss of a host, which took a lease to notice
            faults += self._ranks.losses()
        return faults

    def _notice(self, fault: events.Fault) -> None:
        incident = generation = self._restarts + 1
        t_ns = self._record.now_ns()
        how = "standstill" if fault.kind == "hung" else "pidfd"
        self._record.emit(
            events.Noticed(
                t_ns=t_ns, incident=incident, generation=generation, how=how, fault=fault
            )
        )

    def _pass_on(self, cause: events.Fault) -> None:
        """Record the failure in the error file of a launcher around this one, as torchrun does."""
        target = torchrun_variable("TORCHELASTIC_ERROR_FILE")
        if not target or not cause.worker:
            return
        log_dir = self._run_dir.log_dir(cause.seat, cause.worker)
        try:
            pass_on_error(log_dir, cause.exit_code or -cause.signal, target)
        except OSError as error:
            self._record.note(f"TORCHELASTIC_ERROR_FILE={target} cannot be written: {error}")


def _end_of_mixed(fault: events.Fault) -> EndRun:
    return EndRun(outcome="user_error", exit_code=EXIT_USER_ERROR, cause=fault)


def root_cause(faults: Sequence[events.Fault]) -> events.Fault | None:
    """Return the root cause of the failures, or None if there are none.

    The first failure that is not a broken connection, else the first failure: a broken connection
    is usually the consequence of another rank's exit.
    """
    own = [fault for fault in faults if not _is_echo(fault)]
    return next(iter(own or faults), None)


def _is_echo(fault: events.Fault) -> bool:
    return is_connection_failure(fault.traceback)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
