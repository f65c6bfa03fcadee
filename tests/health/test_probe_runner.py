"""Probe runner: answers, failures, hangs and processes that cannot be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from outlast.health.check_contract import AbsentError, Check, Observation, Probe, Sample
from outlast.health.check_memory import StuckProcess
from outlast.health.probe_runner import (
    ProbeRequest,
    TakenSample,
    is_alive,
    run_probes,
    stuck_processes,
)

FREEZER = Path("/sys/fs/cgroup/freezer")


class Seen(Sample, frozen=True):
    pid: int = 0
    text: str = ""
    fds: tuple[str, ...] = ()


CHECK = Check("seen", "other", Seen, lambda _: (), lambda _s, _a: [Observation("healthy", "")])


def taken(
    *takes: Callable[[], Seen], deadline_s: float = 20.0, within_s: float = 60.0
) -> list[TakenSample]:
    asked = [ProbeRequest(CHECK, Probe(str(k), take, deadline_s)) for k, take in enumerate(takes)]
    return run_probes(asked, within_s=within_s)


def sample(one: TakenSample) -> Seen:
    assert bytes(one.sample) != b"null", one
    return msgspec.json.decode(one.sample, type=Seen)


def hang() -> Seen:
    signal.pause()
    raise AssertionError


def gone(pid: int) -> bool:
    """No such process, or only what is left of it until its parent asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_samples_come_in_the_order_of_the_requests() -> None:
    many = "x" * 3_000_000  # more than a pipe holds
    found = taken(lambda: Seen(text=many), lambda: Seen(text="b"), lambda: Seen(pid=os.getpid()))
    assert [sample(one).text for one in found] == [many, "b", ""]
    assert sample(found[2]).pid != os.getpid()


def test_errors_of_probes_are_reported_and_absence_is_no_error() -> None:
    def absent() -> Seen:
        raise AbsentError("no such thing here")

    def raises() -> Seen:
        raise OSError(5, "Input/output error")

    def dies() -> Seen:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def no_sample() -> Seen:
        return object()  # type: ignore[return-value]

    a, b, c, d = taken(absent, raises, dies, no_sample)
    assert a.absent == "no such thing here" and not a.failed
    assert b.failed == "OSError: [Errno 5] Input/output error"
    assert c.failed == "the process of the probe died" and bytes(c.sample) == b"null"
    assert d.failed.startswith("TypeError")


def test_a_hanging_probe_is_late_and_killed_with_all_that_it_started() -> None:
    began = time.monotonic()
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)

    def starts_another() -> Seen:
        # The child has closed all of its parent's files: it finds this one by its name.
        with Path(f"/proc/{os.getppid()}/fd/{writer}").open("w") as out:
            other = subprocess.Popen(["sleep", "1000"])
            out.write(f"{os.getpid()} {other.pid}")
        return hang()

    late, well = taken(starts_another, Seen, deadline_s=1.0)
    assert late.late == "no answer within 1.0 s" and late.stuck is None
    assert sample(well) == Seen()
    pids = [int(pid) for pid in os.read(reader, 100).split()]
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 30
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        os.sched_yield()
    assert time.monotonic() - began < 60


def test_all_together_have_a_deadline_too() -> None:
    found = taken(hang, hang, deadline_s=1000.0, within_s=0.2)
    assert all(one.late.startswith("no answer within 0.") for one in found)


def test_a_probe_holds_nothing_of_its_parent(tmp_path: Path) -> None:
    """A lock or a pipe that it held would outlive the check where it cannot be killed."""

    def files() -> Seen:
        links = list(Path("/proc/self/fd").iterdir())
        return Seen(fds=tuple(str(link.readlink()) for link in links if link.is_symlink()))

    with (tmp_path / "held").open("w"):
        (one,) = taken(files)
    others = [name for name in sample(one).fds if name != "/dev/null"]
    assert len(others) == 2, "only what its answer goes to, and what it dies with"
    assert all(name.startswith("pipe:") for name in others)


def test_a_probe_without_a_parent_ends_itself() -> None:
    """Slurm kills a check that takes too long; its probes must not stay for ever."""
    code = (
        "import os, signal\n"
        "from outlast.health import probe_runner as probing\n"
        "from outlast.health.check_contract import Check, Probe, Sample\n"
        "probing.GRACE_S = 0.3\n"
        "def hang():\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    signal.pause()\n"
        "check = Check('c', 'other', Sample, None, None)\n"
        "probing.run_probes([probing.ProbeRequest(check, Probe('', hang, 0.3))], within_s=9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(b"probing.GRACE_S = 0.3" in line for line in command_lines()):
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_probe_whose_check_is_killed_ends_at_once_with_what_it_started() -> None:
    """Long before its deadline: nobody can hear it."""
    code = (
        "import os, signal, subprocess\n"
        "from outlast.health.probe_runner import ProbeRequest as Asked, run_probes as take_all\n"
        "from outlast.health.check_contract import Check, Probe, Sample\n"
        "def hang():\n"
        "    subprocess.Popen(['sleep', '98765.4'])\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    signal.pause()\n"
        "check = Check('killed-at-once', 'other', Sample, None, None)\n"
        "take_all([Asked(check, Probe('', hang, 900.0))], within_s=900)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while any(b"killed-at-once" in line or b"98765.4" in line for line in command_lines()):
        assert time.monotonic() < deadline
        os.sched_yield()


def command_lines() -> list[bytes]:
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            try:
                found.append((place / "cmdline").read_bytes())
            except OSError:
                continue
    return found


def test_a_stuck_probe_is_not_started_again() -> None:
    other = subprocess.Popen(["sleep", "1000"])
    try:
        fields = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()
        stuck = StuckProcess(other.pid, int(fields[19]), time.time_ns() - 60 * 10**9)
        asked = [ProbeRequest(CHECK, Probe("a", Seen)), ProbeRequest(CHECK, Probe("b", Seen))]
        a, b = run_probes(asked, within_s=20, stuck={"seen|a": stuck})
        assert f"of 60 s ago (process {other.pid}) is still stuck" in a.late
        assert sample(b) == Seen()
        assert stuck_processes([a, b]) == {"seen|a": stuck}
        assert not is_alive(StuckProcess(other.pid, int(fields[19]) + 1, 0)), (
            "another with its number"
        )
    finally:
        other.kill()
        other.wait(timeout=30)
    assert not is_alive(stuck)
    (again,) = run_probes(asked[:1], within_s=20, stuck={"seen|a": stuck})
    assert sample(again) == Seen()


@pytest.mark.process
def test_a_probe_that_cannot_be_killed_is_left_behind() -> None:
    """As one that waits for a dead file server: a frozen process does not even die of SIGKILL."""
    cage = FREEZER / f"outlast-{os.getpid()}"
    try:
        cage.mkdir()
    except OSError:
        pytest.skip("there is no cgroup freezer of version 1 to be had")

    def freeze() -> Seen:
        (cage / "cgroup.procs").write_text("0")
        (cage / "freezer.state").write_text("FROZEN")
        return hang()

    try:
        late, well = taken(freeze, Seen, deadline_s=1.0)
        if late.stuck is None:
            pytest.skip("this kernel kills frozen processes")
        assert late.late.endswith("cannot be killed, and was abandoned")
        assert is_alive(late.stuck) and sample(well) == Seen()
        (again,) = run_probes(
            [ProbeRequest(CHECK, Probe("0", Seen))], within_s=9, stuck={"seen|0": late.stuck}
        )
        assert "is still stuck" in again.late
    finally:
        (cage / "freezer.state").write_text("THAWED")
        if late.stuck:
            os.waitpid(late.stuck.pid, 0)
        cage.rmdir()
    assert not is_alive(late.stuck)
