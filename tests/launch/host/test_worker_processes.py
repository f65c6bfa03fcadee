"""Worker process families: start, watch, kill and reap."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outlast.launch.host import worker_family
from outlast.launch.host.lost_workers import worker_fault
from outlast.launch.host.reaper import all_processes, read_process_stat
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import (
    WorkerHandle,
    WorkerOutcome,
    WorkerPool,
    WorkerPost,
)
from outlast.launch.run_display import DisplayRecord

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

pytestmark = pytest.mark.process
FAMILY = """
in_child("child")
in_child("moved", os.setsid)
daemon("daemon")
tell("worker")
"""
NAMES = ("worker", "child", "moved", "daemon")


def post(seat: int = 0, name: str = "w1-0") -> WorkerPost:
    return WorkerPost(name, seat, "here", 1, 0)


async def start(
    crew: WorkerPool, seat: int = 0, name: str = "w1-0"
) -> tuple[WorkerHandle, asyncio.Event]:
    died = asyncio.Event()
    worker = crew.start(post(seat, name))
    worker.on_exit = lambda _worker: died.set()
    return worker, died


async def outlive(
    crew: WorkerPool, seat: int = 0, name: str = "w1-0"
) -> tuple[WorkerHandle, WorkerOutcome]:
    """Start a worker, wait for its end, bury it."""
    worker, died = await start(crew, seat, name)
    async with asyncio.timeout(20):
        await died.wait()
    return worker, await crew.reap(worker)


def children() -> list[int]:
    """Ours, dead or alive, that are not of this session: workers' and their orphans."""
    us, session = os.getpid(), os.getsid(0)
    return [p.pid for p in all_processes().values() if p.parent == us and p.session != session]


@pytest.mark.parametrize("end", ["signal.pause()", "sys.exit(3)", "os.kill(os.getpid(), 19)"])
def test_the_whole_family_dies_and_is_reaped(stage: Stage, end: str) -> None:
    """However the main process ends: killed while it lives, by itself, or stopped."""
    become_subreaper()

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, died = await start(crew)
        await stage.eventually_async(
            lambda: all(stage.pid_in(name) for name in NAMES), "everybody is there"
        )
        pids = [stage.pid_in(name) for name in NAMES]
        if "exit" in end:
            await died.wait()
        elif "19" in end:
            await stage.eventually_async(lambda: worker.process.state == "T", "it is stopped")
        warden = set(children()) - set(pids)
        outcome = await crew.reap(worker)
        assert outcome.exit_code == (3 if "exit" in end else -signal.SIGKILL)
        assert [pid for pid in pids if stage.alive(pid)] == []
        assert len(warden) == 1 and set(children()) == warden, "zombies were left"

    stage.play(stage.plan(stage.script(FAMILY + end)), act)


def test_one_familys_death_leaves_the_others_alone(stage: Stage) -> None:
    become_subreaper()
    text = """
rank = os.environ["RANK"]
daemon(f"daemon{rank}")
tell(f"worker{rank}")
signal.pause()
"""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        first, _ = await start(crew, 0, "w1-1")
        await start(crew, 1, "w1-10")  # whose mark begins like the other's
        names = ("worker0", "daemon0", "worker1", "daemon1")
        await stage.eventually_async(lambda: all(map(stage.pid_in, names)), "both are there")
        await crew.reap(first)
        assert [stage.alive(stage.pid_in(name)) for name in names] == [False, False, True, True]

    stage.play(stage.plan(stage.script(text), "--nproc-per-node", "2"), act)


def test_the_death_is_noticed_by_pidfd(stage: Stage) -> None:
    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, died = await start(crew)
        await stage.eventually_async(lambda: stage.pid_in("worker"), "it runs")
        os.kill(worker.process.pid, signal.SIGKILL)
        await asyncio.wait_for(died.wait(), 60)  # nothing else than the pidfd sets it
        outcome = await crew.reap(worker)
        fault = worker_fault(worker, outcome, "here", 1)
        assert (fault.kind, fault.signal, fault.detail) == ("killed", 9, "killed by SIGKILL")

    stage.play(stage.plan(stage.script("tell('worker')\nsignal.pause()")), act)


@pytest.mark.parametrize(("number", "name"), [(34, "SIGRTMIN"), (35, "SIGRTMIN+1"), (50, "+16")])
def test_every_signal_has_a_name(stage: Stage, number: int, name: str) -> None:
    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, outcome = await outlive(crew)
        fault = worker_fault(worker, outcome, "here", 1)
        assert fault.signal == number and fault.detail.endswith(name)

    stage.play(stage.plan(stage.script(f"os.kill(os.getpid(), {number})")), act)


def test_a_buried_process_is_not_watched_any_more(stage: Stage) -> None:
    """Its descriptor's number may be anybody's the moment after."""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, _ = await start(crew)
        os.kill(worker.process.pid, signal.SIGKILL)
        while worker.process.state != "Z":
            pass  # and the loop has no turn to look at it
        held = set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - plain numbers
        await worker.process.reap()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert {str(ours.fileno()), str(theirs.fileno())} & held, "no number was used again"
            heard = asyncio.Event()
            loop = asyncio.get_running_loop()
            for one in (ours, theirs):
                loop.add_reader(one, heard.set)
            theirs.send(b"x")
            await asyncio.wait_for(heard.wait(), 5)
            for one in (ours, theirs):
                loop.remove_reader(one)
        await crew.reap(worker)

    stage.play(stage.plan(stage.script("signal.pause()")), act)


def test_who_cannot_be_watched_does_not_live(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        warden = children()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", no_descriptor_left)
            with pytest.raises(OSError, match="Too many open files"):
                crew.start(post())
        assert children() == warden and not crew.workers

    stage.play(stage.plan(stage.script("signal.pause()")), act)


def test_no_worker_gets_a_device_that_the_host_has_not(stage: Stage) -> None:
    """World 2 and 2 spares are 4 devices, whoever has died and been replaced."""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        first = {}
        for seat, name in ((0, "w1-0"), (1, "w1-1"), (-1, "w1-2"), (-1, "w1-3")):
            first[name], _ = await start(crew, seat, name)
        assert [worker.local_rank for worker in first.values()] == [0, 1, 2, 3]
        await crew.reap(first["w1-1"])  # a spare sits there now
        spare, _ = await start(crew, -1, "w1-4")
        assert spare.local_rank == 1
        await crew.reap(first["w1-2"])
        respawned, _ = await start(crew, 1, "w1-5")
        assert respawned.local_rank == 2
        beyond, _ = await start(crew, -1, "w1-6")
        assert beyond.local_rank < 4

    flags = ("--nproc-per-node", "2", "--spares", "2")
    stage.play(stage.plan(stage.script("signal.pause()"), *flags), act)


def test_what_a_failure_looks_like_from_outside(stage: Stage) -> None:
    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, outcome = await outlive(crew)
        fault = worker_fault(worker, outcome, "here", 1)
        assert (fault.kind, fault.exit_code, fault.seat, fault.host) == ("exited", 1, 0, "here")
        assert fault.traceback.splitlines()[-1] == "ValueError: no such luck"
        assert len(fault.traceback.splitlines()) == 40
        logs = crew.run_dir.path / "logs" / "0" / "w1-0"
        assert (logs / "stdout.log").read_text() == "said\n"
        assert "ValueError" in (logs / "stderr.log").read_text()

    text = "print('said')\nprint('x\\n' * 60, file=sys.stderr)\nraise ValueError('no such luck')"
    stage.play(stage.plan(stage.script(text)), act)


def test_a_command_that_cannot_run(stage: Stage) -> None:
    bad = stage.root / "bad.sh"
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o755)

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        _, outcome = await outlive(crew)
        assert outcome.exit_code == 127
        assert "cannot execute" in outcome.stderr_tail

    stage.play(stage.plan(bad, "--no-python"), act)


def test_the_page_outlives_the_worker(stage: Stage) -> None:
    text = """
from outlast.config import worker_settings
from outlast.transport.worker_page import Page
page = Page(worker_settings().page_fd)
page.put("before", 7, b"mine")
page.beat(7, 3, "running", 2, 1, 1, 0.5)
os.kill(os.getpid(), 9)
"""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        _, outcome = await outlive(crew)
        assert outcome.slots == {"before:7": b"mine"}
        assert outcome.beat
        assert (outcome.beat.n, outcome.beat.step, outcome.beat.state) == (7, 3, "running")

    stage.play(stage.plan(stage.script(text)), act)


def test_torchruns_environment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("RANK", "99")
    monkeypatch.setenv("MINE", "kept")

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        for seat, name in ((1, "w1-1"), (-1, "w1-2")):
            await outlive(crew, seat, name)
        logs = crew.run_dir.path / "logs"
        seated = dict(line.split("=", 1) for line in _lines(logs / "1/w1-1/stdout.log"))
        spare = dict(line.split("=", 1) for line in _lines(logs / "spare/w1-2/stdout.log"))
        for name, value in {
            "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2",
            "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(crew.master_port),
            "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MINE": "kept",
        }.items():  # fmt: skip
            assert seated[name] == value, name
        assert spare["LOCAL_RANK"] == "2" and "RANK" not in spare and "ROLE_RANK" not in spare

    text = "for name, value in os.environ.items(): print(f'{name}={value}')"
    flags = ("--nproc-per-node", "2", "--spares", "1", "--max-restarts", "2")
    meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "job7")
    stage.play(stage.plan(stage.script(text), *flags, *meeting), act)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if "=" in line]


def test_what_the_user_set_is_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("PYTHONHASHSEED", "5")

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        await outlive(crew)
        out = (crew.run_dir.path / "logs/0/w1-0/stdout.log").read_text()
        assert out.split() == ["3", "5"]

    text = "print(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONHASHSEED'])"
    stage.play(stage.plan(stage.script(text), "--nproc-per-node", "2"), act)


def held_by(pid: int) -> list[str]:
    held = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            held.append(str(fd.readlink()))
    return held


def test_the_warden_holds_the_lock(stage: Stage) -> None:
    """So that the next launcher waits until it has cleaned up."""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        [warden] = children()
        assert str(crew.run_dir.path / "lock") in held_by(warden)

    stage.play(stage.plan(stage.script("")), act)


def wardens(crew: WorkerPool) -> list[int]:
    lock = str(crew.run_dir.path / "lock")
    living = [
        pid for pid in children() if (seen := read_process_stat(pid)) and seen.state not in "ZX"
    ]
    return [pid for pid in living if lock in held_by(pid)]


# Neither its environment nor its parents tell whose it is: only its session does.
NAMELESS = 'tell("worker")\nos.execve("/bin/sleep", ["sleep", "1000"], {})'


def test_a_warden_that_dies_is_replaced_and_told_everything(stage: Stage) -> None:
    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, died = await start(crew)
        await stage.eventually_async(
            lambda: "sleep" in Path(f"/proc/{worker.process.pid}/comm").read_text(),
            "it is nameless",
        )
        [first] = wardens(crew)
        os.kill(first, signal.SIGKILL)
        await stage.eventually_async(lambda: set(wardens(crew)) - {first}, "there is another one")
        await stage.eventually_async(lambda: stage.notes, "it is said")
        assert "SIGKILL" in stage.notes[0] and "another one was started" in stage.notes[0]
        assert first not in all_processes(), "a zombie was left"
        crew._reaper.dismiss()  # its end of the pipe closes, as when the launcher is killed
        await asyncio.wait_for(died.wait(), 5)
        assert len(stage.notes) == 1

    stage.play(stage.plan(stage.script(NAMELESS)), act)


def test_without_any_warden_the_launcher_sweeps(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_family, "REAPERS_MAX", 1)

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        _, died = await start(crew)
        await stage.eventually_async(lambda: stage.pid_in("worker"), "it runs")
        for count in (1, 2):
            [warden] = wardens(crew)
            os.kill(warden, signal.SIGKILL)
            await stage.eventually_async(lambda n=count: len(stage.notes) == n, "it is said")
        assert "too often" in stage.notes[1] and not wardens(crew)
        crew._reaper.dismiss()
        await asyncio.wait_for(died.wait(), 5)

    stage.play(stage.plan(stage.script(NAMELESS)), act)


def test_who_survives_sigkill_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process does on a healthy kernel, so here the signals are not sent."""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        worker, _ = await start(crew)
        with monkeypatch.context() as patch:
            patch.setattr(worker_family, "KILL_S", -1.0)
            patch.setattr(worker_family.WorkerFamily, "send_signal", lambda *_: None)
            patch.setattr(worker_family.reaper, "kill", lambda _: None)
            await crew.close()
        assert "survive SIGKILL" in stage.notes[0] and str(worker.process.pid) in stage.notes[0]

    stage.play(stage.plan(stage.script("signal.pause()")), act)


def test_one_clock_for_all_processes_of_a_host(stage: Stage) -> None:
    """The host's time may be set between two starts: a later worker's events do not shift."""
    text = """
from outlast.config import worker_settings
from outlast.telemetry.event_store import EventClock as Clock
print(Clock(worker_settings().clock_anchor_ns).now_ns())
"""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        crew.clock.anchor_ns -= 3600 * 10**9  # as if the host had been set ahead by an hour
        before_ns = crew.clock.now_ns()
        await outlive(crew)
        told_ns = int((crew.run_dir.path / "logs/0/w1-0/stdout.log").read_text())
        assert before_ns < told_ns < crew.clock.now_ns()

    stage.play(stage.plan(stage.script(text)), act)
