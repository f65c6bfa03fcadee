"""Kills by the kernel for want of the host's memory, told from kills by others."""

from __future__ import annotations

from pathlib import Path

from outlast.launch.host.lost_workers import worker_fault
from outlast.launch.host.worker_family import oom_kills
from outlast.launch.host.worker_pool import WorkerHandle, WorkerOutcome, WorkerPost


def test_they_are_counted_where_they_can_be_read(tmp_path: Path) -> None:
    groups, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    assert oom_kills(groups, proc) == -1
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    assert oom_kills(groups, proc) == 5, "of the whole host"
    (proc / "self/cgroup").write_text("4:cpu,memory:/job/a\n0::/unified/b\n")
    second = groups / "unified/b"
    second.mkdir(parents=True)
    (second / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    assert oom_kills(groups, proc) == 2, "of the control group"
    first = groups / "memory/job/a"
    first.mkdir(parents=True)
    (first / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom_kills(groups, proc) == 1
    (first / "memory.oom_control").write_bytes(b"\xff\n")
    (second / "memory.events").write_text("oom_kill many\n")
    assert oom_kills(groups, proc) == 5, "what cannot be read is passed"


def test_the_fault_of_a_killed_worker_says_so() -> None:
    post = WorkerPost(name="w1-1", seat=1, agent="a", incarnation=1, restart_count=0)
    worker = WorkerHandle(post, 1)
    assert worker.oom_kills == oom_kills(), "counted before its start"

    def detail(code: int = -9, *, kills: int = 5) -> str:
        outcome = WorkerOutcome(code, None, {}, "")
        return worker_fault(worker, outcome, "here", 1, lambda: kills).detail

    worker.oom_kills = 3
    assert detail().startswith("killed by SIGKILL; the kernel has killed 2 process(es) here")
    assert detail(kills=3) == "killed by SIGKILL"
    assert detail(kills=-1) == "killed by SIGKILL", "it cannot be read any more"
    assert detail(-15) == "killed by SIGTERM", "the kernel's is a SIGKILL"
    worker.oom_kills = -1
    assert detail() == "killed by SIGKILL", "the count was unknown"
