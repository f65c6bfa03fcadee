"""Schedules of kills: drawn, published, and carried out on real processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from outlast import events
from outlast.cli.bench.kill_schedule import (
    KillInjector,
    KillRecord,
    KillSchedule,
    PlannedKill,
    draw_schedule,
    read_schedule,
)
from outlast.errors import ConfigError
from outlast.launch.notices import drain_requests
from outlast.telemetry.event_store import DIRECTORY
from outlast.telemetry.segment_files import SegmentWriter


def test_a_seed_gives_the_same_kills_and_a_longer_schedule_begins_with_them() -> None:
    short, long = draw_schedule(7, 10, 4, 300), draw_schedule(7, 10, 4, 3000)
    assert long.kills[: len(short.kills)] == short.kills
    assert draw_schedule(8, 10, 4, 300).kills != short.kills
    gaps = [b.at_s - a.at_s for a, b in zip(long.kills, long.kills[1:], strict=False)]
    assert 8 < sum(gaps) / len(gaps) < 12
    assert {kill.rank for kill in long.kills} == {0, 1, 2, 3}
    assert short.kills[0].at_s >= 3.0


def test_a_published_schedule_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    drawn = draw_schedule(1, 5, 4, 100)
    path.write_bytes(msgspec.json.encode(drawn))
    assert read_schedule(path, 4) == drawn
    with pytest.raises(ConfigError, match="is for 4 ranks, and the job has 2"):
        read_schedule(path, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no schedule"),
        ("[]", "is no schedule"),
        ('{"seed":1,"every_s":1,"world":4,"kills":[{"at_s":5,"rank":4}]}', "is for 4 ranks"),
        (
            '{"seed":1,"every_s":1,"world":4,"kills":[{"at_s":5,"rank":1},{"at_s":4,"rank":1}]}',
            "not in order of time",
        ),
        ('{"seed":1,"every_s":1,"world":4,"kills":[{"at_s":-1,"rank":1}]}', "not in order"),
        ('{"version":2,"seed":1,"every_s":1,"world":4,"kills":[]}', "not of version 1"),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_schedule(path, 4)
    with pytest.raises(ConfigError, match="No such file"):
        read_schedule(tmp_path / "none.json", 4)


class _Run:
    """Events of a run, and real processes that are its workers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._writer = SegmentWriter(run_dir / DIRECTORY, "bench")
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.emit(
            events.RunStarted(t_ns=1, run="r", term=1, world=2, spares=1, script="s", args=())
        )

    def emit(self, event: events.AnyEvent) -> None:
        self._writer.append(events.encoder.encode(event))

    def spawn(self, worker: str, seat: int) -> None:
        code = "import threading; threading.Event().wait(60)"
        process = self.workers[worker] = subprocess.Popen([sys.executable, "-c", code])
        self.emit(events.WorkerSpawned(t_ns=2, worker=worker, seat=seat, pid=process.pid, host="h"))

    def seat(self, worker: str, seat: int) -> None:
        self.emit(events.WorkerSeated(t_ns=3, worker=worker, seat=seat, generation=1))

    def step(self, seat: int, step: int) -> None:
        now_ns = time.time_ns()
        self.emit(
            events.PhaseDone(
                t_ns=now_ns, worker=f"w{seat}", seat=seat, generation=1, n=step, step=step,
                kind="step", t_begin_ns=now_ns, t_vote_ns=now_ns,
            )
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()
        for process in self.workers.values():
            process.kill()
            process.wait(10)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[_Run]:
    found = _Run(tmp_path)
    for seat in range(2):
        found.spawn(f"w{seat}", seat)
        found.seat(f"w{seat}", seat)
    yield found
    found.close()


def carried_out(run: _Run, *kills: PlannedKill, steps: int, notice_s: float = 0.0) -> KillInjector:
    injector = KillInjector(run.run_dir, kills, 2, steps, notice_s)
    injector.start()
    return injector


@pytest.mark.process
def test_the_worker_that_has_the_rank_is_killed(run: _Run) -> None:
    injector = carried_out(run, PlannedKill(at_s=0.0, rank=1), steps=100)
    for seat in range(2):
        run.step(seat, 1)
    assert run.workers["w1"].wait(30) == -9
    injector.join(10)
    assert injector.records == [KillRecord(at_s=0.0, rank=1, worker="w1", fate="killed")]
    assert run.workers["w0"].poll() is None


@pytest.mark.process
def test_nobody_is_killed_before_the_first_step_or_in_the_last_ones(run: _Run) -> None:
    injector = carried_out(run, PlannedKill(at_s=0.0, rank=1), steps=15)
    for step in range(1, 6):  # of 15, without the last 10
        run.step(0, step)
        run.step(1, step)
    injector.join(30)
    assert [one.fate for one in injector.records] == ["ended"]
    assert all(process.poll() is None for process in run.workers.values())
    waiting = carried_out(run, PlannedKill(at_s=0.0, rank=1), steps=100)
    waiting.stop()
    assert not waiting.is_alive()


@pytest.mark.process
def test_a_worker_that_moved_after_its_notice_is_not_killed(run: _Run) -> None:
    injector = carried_out(run, PlannedKill(at_s=2.0, rank=1), steps=100, notice_s=60.0)
    for seat in range(2):
        run.step(seat, 1)
    pause = threading.Event()
    for _ in range(1500):
        if requests := drain_requests.read(run.run_dir, print):
            break
        pause.wait(0.02)
    (request,) = requests
    assert (request.worker, request.rank, request.within_s) == ("w1", 1, 0.0)
    fault = events.Fault(kind="requested", detail="moved")
    run.emit(events.WorkerLost(t_ns=4, worker="w1", seat=1, fault=fault))
    run.spawn("w2", -1)
    run.seat("w2", 1)
    injector.join(30)
    assert [(one.worker, one.fate) for one in injector.records] == [("w1", "moved")]
    assert run.workers["w2"].poll() is None


def test_the_schedule_is_the_format_that_is_published() -> None:
    text = msgspec.json.encode(
        KillSchedule(seed=1, every_s=5.0, world=4, kills=(PlannedKill(at_s=3.5, rank=2),))
    )
    assert text == (
        b'{"version":1,"seed":1,"every_s":5.0,"world":4,"kills":[{"at_s":3.5,"rank":2}]}'
    )
