"""CPU time of real processes and their children, as the hang monitor reads it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.launch.conftest import Stage
from tests.launch.host.test_agent import SPEAKER, Desk, with_desk

from outlast.launch.host.hang_monitor import ProcessorTime
from outlast.launch.host.worker_pool import WorkerPool
from outlast.transport import messages

pytestmark = pytest.mark.process

SLEEP = "import signal; signal.pause()"
WORK = "while True: pass"
CHILD_WORKS = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {WORK!r}], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""
THREAD_WORKS = """
import threading
def work():
    while True: sum(range(1000))
threading.Thread(target=work, daemon=True).start()
threading.Event().wait()
"""


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        yield made
    finally:
        made.kill()
        made.communicate(timeout=10)


@pytest.mark.parametrize("code", [WORK, THREAD_WORKS])
def test_a_process_that_computes_is_seen_to(stage: Stage, code: str) -> None:
    effort = ProcessorTime(0.1)
    with process(code) as busy:
        stage.eventually(
            lambda: effort.sample([busy.pid]) or effort.worked_ns(busy.pid), "seen working"
        )
        first_ns = effort.worked_ns(busy.pid)
        stage.eventually(
            lambda: effort.sample([busy.pid]) or effort.worked_ns(busy.pid) > first_ns, "and again"
        )


def test_so_is_one_whose_child_computes_in_a_session_of_its_own(stage: Stage) -> None:
    effort = ProcessorTime(0.1)
    with process(CHILD_WORKS) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        try:
            stage.eventually(
                lambda: effort.sample([parent.pid]) or effort.worked_ns(parent.pid), "seen working"
            )
        finally:
            os.kill(child, signal.SIGKILL)


def test_one_that_waits_is_not(stage: Stage) -> None:
    effort = ProcessorTime(0.1)
    with process(SLEEP) as idle, process(WORK) as busy:
        both = [idle.pid, busy.pid]
        stage.eventually(lambda: effort.sample(both) or effort.worked_ns(busy.pid), "the busy one")
        for _ in range(3):
            last_ns = effort.worked_ns(busy.pid)
            stage.eventually(
                lambda last_ns=last_ns: effort.sample(both) or effort.worked_ns(busy.pid) > last_ns,
                "the busy one again",
            )
        assert effort.worked_ns(idle.pid) < effort.worked_ns(busy.pid)
        effort.sample([])
        assert effort.worked_ns(busy.pid) == 0  # whoever is not asked about is forgotten


def test_stages_that_a_worker_reports_are_known_to_the_monitor(stage: Stage) -> None:
    report = 'say(messages.StateProtected(schema="", summary="", stages=(0, 2)))'

    async def act(desk: Desk, crew: WorkerPool) -> None:
        desk.say(messages.Spawn(worker="w1-0", seat=0))
        await desk.until(messages.StateProtected)
        assert crew.workers["w1-0"].stages == (0, 2)

    with_desk(stage, SPEAKER.replace("tell(", f"{report}\ntell(", 1), act)
