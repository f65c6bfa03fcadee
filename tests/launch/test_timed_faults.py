"""Timed faults (`--fault ...,after=SECONDS`) on processes without a session."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from tests.launch.conftest import Stage

from outlast import events
from outlast.controller.fault_spec import parse
from outlast.launch.host.worker_pool import WorkerPool, WorkerPost
from outlast.launch.run_display import DisplayRecord
from outlast.launch.timed_faults import TimedFaults
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process

IDLE = "tell(f'up{os.environ[\"RANK\"]}')\nsignal.pause()\n"


async def start(stage: Stage, crew: WorkerPool) -> None:
    for seat in range(crew.plan.world):
        crew.start(WorkerPost(f"w1-{seat}", seat, "here", 1, 0))
    for seat in range(crew.plan.world):
        await stage.eventually_async(lambda seat=seat: stage.pid_in(f"up{seat}"), "it is up")


def told(run_dir: Path) -> list[events.AnyEvent]:
    return [e for e in read_events(run_dir) if isinstance(e, events.FaultInjected | events.Note)]


def test_a_worker_is_killed_once_in_the_runs_life(stage: Stage) -> None:
    async def act(crew: WorkerPool, record: DisplayRecord) -> None:
        await start(stage, crew)
        before = crew.workers["w1-1"]
        await TimedFaults(crew, record).run()
        assert (await crew.reap(before)).exit_code == -signal.SIGKILL
        assert crew.workers["w1-0"].process.state == "S"
        await asyncio.wait_for(TimedFaults(crew, record).run(), 5)  # a resumed run: it has struck

    plan = stage.plan(
        stage.script(IDLE), "--nproc-per-node", "2", "--fault", "kill:rank=1,after=0.2"
    )
    stage.play(plan, act)
    (struck,) = told(Path(plan.run_dir))
    assert isinstance(struck, events.FaultInjected)
    assert (struck.worker, struck.seat, struck.n, struck.step) == ("w1-1", 1, -1, -1)
    assert parse(struck.spec).after_s == 0.2


def test_a_worker_that_is_stopped_for_a_time_goes_on(stage: Stage) -> None:
    async def act(crew: WorkerPool, record: DisplayRecord) -> None:
        await start(stage, crew)
        worker = crew.workers["w1-0"]  # no rank is named: the first
        striking = asyncio.create_task(TimedFaults(crew, record).run())
        await stage.eventually_async(lambda: worker.process.state == "T", "it is stopped")
        await striking
        await stage.eventually_async(lambda: worker.process.state == "S", "it goes on")

    flags = ("--nproc-per-node", "2", "--fault", "stop:after=0.2,for=0.5")
    stage.play(stage.plan(stage.script(IDLE), *flags), act)


def test_what_never_struck_is_said_with_the_reason(stage: Stage) -> None:
    async def act(crew: WorkerPool, record: DisplayRecord) -> None:
        await start(stage, crew)
        strikes = TimedFaults(crew, record)
        await strikes.run()
        strikes.note_missed(plain=True)
        strikes.note_missed(plain=False)

    flags = ("--fault", "kill:step=3", "--fault", "kill:after=0.1")
    plan = stage.plan(stage.script(IDLE), *flags)
    stage.play(plan, act)
    texts = [e.text for e in told(Path(plan.run_dir)) if isinstance(e, events.Note)]
    assert len(texts) == 2 and all("kill:step=3 did not strike" in text for text in texts)
    assert "no worker came to outlast.init()" in texts[0] and "never came to its place" in texts[1]
