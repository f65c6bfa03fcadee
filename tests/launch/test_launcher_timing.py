"""Slow scripts, and a launcher that was suspended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.launch.conftest import TRAINER, Stage

from outlast.controller.inputs import DecisionMade, Opened
from outlast.launch.controller_shell import ControllerShell
from outlast.launch.host.worker_pool import WorkerPool
from outlast.launch.run_display import DisplayRecord
from outlast.launch.start_point import CheckpointSearch
from outlast.telemetry.segment_files import SegmentWriter
from outlast.transport import channel, messages

pytestmark = pytest.mark.process
TRAINING = (
    TRAINER
    + """
for batch in session.batches(loader, until=4000):
    session.run(step, batch)
    if session.step_index == 3:
        tell(f"training{session.rank}")
    time.sleep(0.005)  # there are 4000 steps, and it must not come to their end
"""
)


@contextmanager
def launched(stage: Stage, script: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    launcher = stage.launch(script, "--nproc-per-node", "2", *flags, stderr=subprocess.STDOUT)
    try:
        with launcher:
            yield launcher
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(10)


@pytest.mark.extended
@pytest.mark.parametrize("before", ["", "tell('init'), outlast.init(),"])
def test_a_script_may_take_its_time_before_it_says_anything(stage: Stage, before: str) -> None:
    """Longer than hello_s: one never calls init(), the other is slow on all ranks alike."""
    script = stage.script(f"time.sleep(4)\nimport outlast\n({before})\n")
    with launched(stage, script, "--limit", "hello_s=2") as launcher:
        out, _ = launcher.communicate(timeout=60)
    assert "did not reach init()" not in out
    assert launcher.returncode == 0 if not before else stage.pid_in("init")


@pytest.mark.extended
def test_what_is_shared_is_made_once_however_long_it_takes(stage: Stage) -> None:
    """Longer than `shared_s`: whoever waits asks again, and nothing else happens."""
    text = """
import outlast
session = outlast.init()
session.protect()
def make():
    tell(f"maker{session.rank}-{time.monotonic_ns()}")
    time.sleep(2)
    return os.getpid()
tell(f"is{session.shared('id', make)}-{session.rank}")
"""
    with launched(stage, stage.script(text), "--limit", "shared_s=0.3") as launcher:
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, out
    assert len(list(stage.root.glob("maker*"))) == 1
    values = {path.name.split("-")[0] for path in stage.root.glob("is*")}
    assert len(values) == 1 and len(list(stage.root.glob("is*"))) == 2


@pytest.mark.extended
def test_a_launcher_that_stood_still_stops_its_run_in_order(stage: Stage) -> None:
    """Ctrl-Z, then `kill %1`: SIGTERM and SIGCONT, a lease and a half later."""
    with launched(stage, stage.script(TRAINING), "--limit", "lease_s=2") as launcher:
        for rank in (0, 1):
            stage.eventually(lambda rank=rank: stage.pid_in(f"training{rank}"), "both train")
        pids = [stage.pid_in(f"training{rank}") for rank in (0, 1)]
        launcher.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(3.5)
        assert all(map(stage.alive, pids))
        launcher.send_signal(signal.SIGTERM)
        launcher.send_signal(signal.SIGCONT)
        out, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 4, out
    assert "launcher stalled" in out and "lease" not in out
    assert list((stage.root / "run/checkpoints").iterdir())


def test_a_later_term_under_another_host_name_starts_its_workers(stage: Stage) -> None:
    """Nobody has said Hello, and the agent of the earlier term will never come."""

    async def scene(crew: WorkerPool, record: DisplayRecord) -> None:
        writer = SegmentWriter(crew.run_dir.room("journal"), "term000000", durable=True)
        decided = DecisionMade(
            generation=1, n=0, step=0, verdict="start", seats=("w0-0",), agents=("old",)
        )
        for entry in (decided, Opened(generation=1, n=0)):
            writer.append(msgspec.msgpack.encode(entry))
        writer.close()
        controller = ControllerShell(
            crew.plan, crew.run_dir, stage.token, record, None,
            CheckpointSearch(crew.run_dir.room("checkpoints"), crew.run_dir.job.run, (), ""),
        )  # fmt: skip
        controller.begin()
        reader, wire_out = await asyncio.open_connection(*controller.address)
        body = messages.AgentHello(host="new", address="", capacity=2, lease_s=30)
        hello = messages.MessageEnvelope(
            run=controller.job.run,
            term=1,
            agent="new",
            incarnation=1,
            worker="",
            seq=1,
            body=body,
        )
        wire_out.write(channel.encode_frame(hello, stage.token))
        decoder, heard = channel.FrameDecoder(stage.token), []
        try:
            while not any(isinstance(frame.body, messages.Spawn) for frame in heard):
                heard += decoder.feed(await asyncio.wait_for(reader.read(65536), 10))
        finally:
            wire_out.close()
            await wire_out.wait_closed()
            controller.close()

    plan = stage.plan(stage.script("pass"), "--limit", "lease_s=1")
    stage.play(plan, scene)
