"""One launcher from beginning to end: everything is started here, and everything ends here."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from outlast import events, wire
from outlast.checkpoint import store
from outlast.core.contract import End
from outlast.errors import EXIT_GAVE_UP, EXIT_INTERRUPTED
from outlast.launch import preflight, rundir
from outlast.launch.agent import Agent
from outlast.launch.arguments import RunPlan
from outlast.launch.console import Console
from outlast.launch.controller import Controller
from outlast.launch.crew import Crew, Worker
from outlast.launch.display import Display, Record
from outlast.launch.plain import PlainGroup
from outlast.launch.processes import become_subreaper
from outlast.launch.rundir import RunDir
from outlast.observe.store import EventWriter

GRACE_S = 15.0  # above `stop_s`: then the launcher ends without waiting for anybody's consent


def launch(plan: RunPlan, show: Callable[[Path], Display]) -> tuple[End, Path]:
    """Run the plan to its end; the end and the run directory. `show` opens the view of a run
    directory, once it is taken.

    Raises ConfigError and RunDirError before anything was started, and OutlastError when the run
    broke in a way that the controller could not decide about; nobody is left alive either way.
    """
    preflight.check(plan)
    run_dir = rundir.take(Path(plan.run_dir), plan.script, plan.args, plan.world)
    try:
        rundir.place_logs(run_dir, plan.log_dir)
        writer = EventWriter(run_dir.room("events"), f"launcher{run_dir.job.term:06d}")
        record = Record(writer, show(run_dir.path))
        try:
            end = asyncio.run(_Launcher(plan, run_dir, record).run())
        finally:
            record.close()
    finally:
        run_dir.release()
    return end, run_dir.path


class _Launcher:
    """The parts of one launcher while it runs."""

    def __init__(self, plan: RunPlan, run_dir: RunDir, record: Record) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._record = record
        self._stops = 0
        self._plain: PlainGroup | None = None
        self._over: asyncio.Future[End]
        self._went_plain: asyncio.Event
        self._controller: Controller
        self._agent: Agent
        self._crew: Crew

    async def run(self) -> End:
        plan, record = self._plan, self._record
        token = secrets.token_bytes(32)
        checkpoint = _newest_checkpoint(self._run_dir, record)
        self._begin(checkpoint)
        become_subreaper()
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._went_plain = asyncio.Event()
        self._crew = Crew(plan, self._run_dir, token, socket.gethostname())
        console = Console(self._crew, record.display)
        end = End(outcome="gave_up", exit_code=EXIT_GAVE_UP)
        try:
            self._controller = Controller(plan, self._run_dir, token, record, checkpoint)
            self._agent = Agent(self._crew, self._controller.address, token, self._find_plain)
            with self._signals(loop):
                following = asyncio.create_task(console.run())
                try:
                    end = await self._lead()
                finally:
                    following.cancel()
                    await self._crew.close()
        finally:
            console.look()
            record.emit(
                events.RunEnded(
                    t_ns=record.now_ns(),
                    outcome=end.outcome,
                    exit_code=end.exit_code,
                    n=end.n,
                    step=end.step,
                    cause=end.cause,
                )
            )
        return end

    async def _lead(self) -> End:
        """The controller leads while the script may be one of ours; else the plain group."""
        self._controller.begin()
        serving = asyncio.create_task(self._agent.run())
        went_plain = asyncio.create_task(self._went_plain.wait())
        waiting = {self._controller.ended, self._over, serving, went_plain}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            went_plain.cancel()
            serving.cancel()
            self._controller.close()
        if self._over.done():
            return self._over.result()
        if self._plain:
            plain = asyncio.create_task(self._plain.run())
            await asyncio.wait({plain, self._over}, return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                plain.cancel()
                return self._over.result()
            return plain.result()
        if serving.done() and not self._controller.ended.done():
            serving.result()  # raises what broke the agent
        return self._controller.ended.result()

    def _begin(self, checkpoint: wire.Checkpointed | None) -> None:
        job, plan = self._run_dir.job, self._plan
        resumed = checkpoint if self._run_dir.resumed else None
        self._record.emit(
            events.RunStarted(
                t_ns=self._record.now_ns(),
                run=job.run,
                term=job.term,
                world=plan.world,
                spares=plan.spares,
                script=plan.script,
                args=plan.args,
                resumed_n=resumed.n if resumed else -1,
                resumed_step=resumed.step if resumed else -1,
            )
        )
        for note in self._run_dir.notes:
            self._record.note(note)

    def _find_plain(self, exited: Worker | None = None) -> None:
        if self._plain is None:
            self._agent.step_back()
            self._plain = PlainGroup(self._crew, self._record)
            self._went_plain.set()
        if exited:
            self._plain.exited(exited)

    # --- signals --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        numbers = [
            number
            for number in (signal.Signals[name] for name in self._plan.stop_signals)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup means it
        ]
        for number in numbers:
            loop.add_signal_handler(number, self._asked, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _asked(self, number: signal.Signals) -> None:
        """First: drain and end resumable. Second: end now. Third: without the controller."""
        self._stops += 1
        reason = f"{number.name} to the launcher"
        if self._stops == 1:
            self._record.note(f"{reason}: stopping; once more to stop at once")
            loop = asyncio.get_running_loop()
            loop.call_later(self._plan.limits.stop_s + GRACE_S, self._give_in, reason)
        else:
            self._record.note(f"{reason}, again: everything is killed")
        if not self._agent.said_hello:
            self._find_plain()
        if self._plain is None:
            self._controller.stop(reason)
            if self._stops > 2:
                self._give_in(reason)
        elif self._stops == 1:
            self._plain.stop()
        else:
            self._give_in(reason)

    def _give_in(self, reason: str) -> None:
        if not self._over.done():
            cause = events.Fault(kind="requested", detail=reason, t_ns=self._record.now_ns())
            self._over.set_result(
                End(outcome="interrupted", exit_code=EXIT_INTERRUPTED, cause=cause)
            )


def _newest_checkpoint(run_dir: RunDir, record: Record) -> wire.Checkpointed | None:
    found = store.newest(run_dir.room("checkpoints"), record.note)
    if found is None:
        return None
    return wire.Checkpointed(n=found.n, step=found.step, path=str(found.path.absolute()))


def frame_cause(end: End) -> str:
    """The one root cause, framed for a terminal; "" when the run is done."""
    fault = end.cause
    if end.outcome == "done" or fault is None:
        return ""
    where = [f"rank {fault.seat}"] if fault.seat >= 0 else []
    where += [f"worker {fault.worker}"] if fault.worker else []
    where += [f"host {fault.host}"] if fault.host else []
    where += [f"step {fault.step}"] if fault.step >= 0 else []
    lines = [f"{end.outcome.replace('_', ' ')}: {fault.kind}: {fault.detail}", ", ".join(where)]
    lines += fault.traceback.rstrip().splitlines()
    rule = "-" * 72
    return "\n".join([rule, *filter(None, lines), rule])
