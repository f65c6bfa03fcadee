"""Agent that leaves one controller for that of a newer term."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.launch.host.test_agent import SPEAKER, Desk, with_desk

from outlast.launch.host.worker_pool import WorkerPool
from outlast.transport import messages

if TYPE_CHECKING:
    from tests.launch.conftest import Stage


def test_a_newer_term_hears_of_dead_workers_only(stage: Stage) -> None:
    """A controller that was cut off has killed by name a worker that its agent no longer knew. The
    report is false for a newer term, which may know that worker as a rank's."""

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.WorkerHello)
        desk.say(messages.Kill(worker="w1-9", reason="the agent reconnected without w1-9"))
        assert (await desk.until(messages.WorkerLostReport)).fault.detail.startswith("never")
        os.kill(crew.workers["w1-0"].process.pid, signal.SIGKILL)
        await desk.until(messages.WorkerLostReport, 2)
        desk.agent.follow(2, "n2", desk.listener.getsockname()[:2])
        assert (await desk.until(messages.WorkerLostReport, 3)).worker == "w1-0"

    with_desk(stage, SPEAKER, act)
