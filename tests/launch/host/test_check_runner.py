"""Node checks beside a run, in real processes, and handling of their results."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from outlast.controller.inputs import FindingKey, Opened, RankMigrated
from outlast.events import Warned
from outlast.health.check_memory import refuse_shared_directory
from outlast.launch.host import check_runner
from outlast.launch.host.check_runner import (
    CheckFailedError,
    CheckProcess,
    CheckRunner,
    failed,
    local_rank,
    read,
    remaining_findings,
)
from outlast.launch.host.worker_family import become_subreaper
from outlast.launch.host.worker_pool import WorkerPool, WorkerPost
from outlast.log_records import Finding
from outlast.transport import messages

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

PCI = ["0000:1b:00.0", "0000:3b:00.0", "0001:05:00.0"]


def finding(severity: str, check: str = "gpu", **what: str) -> Finding:
    said = {"code": "", "device": "", "detail": "it said", **what}
    return Finding(
        t_ns=5, cluster="c", node="n", check=check, symptom="gpu-driver",
        severity=severity, **said,  # type: ignore[arg-type]
    )  # fmt: skip


def report(*findings: Finding) -> bytes:
    return msgspec.json.encode({"version": 1, "notes": [], "findings": findings})


def test_what_is_not_healthy_is_found_the_worst_first() -> None:
    seen = read(report(finding("warn"), finding("healthy", "link"), finding("now", device="GPU 1")))
    assert [(one.severity, one.device) for one in seen.found] == [("now", "GPU 1"), ("warn", "")]
    assert seen.complete_checks == ("gpu", "link", check_runner.OWN)


def test_a_check_that_could_not_tell_all_ends_nothing() -> None:
    seen = read(report(finding("healthy", "mount"), finding("unknown", "mount", device="/scratch")))
    assert [one.severity for one in seen.found] == ["unknown"] and seen.complete_checks == (
        check_runner.OWN,
    )


def test_what_is_left_out_is_not_over() -> None:
    many = [finding("warn", device=str(number)) for number in range(check_runner.FOUND_MAX + 1)]
    seen = read(report(*many, finding("now", "disk", detail="x" * 9000)))
    assert len(seen.found) == check_runner.FOUND_MAX and seen.complete_checks == (
        "disk",
        check_runner.OWN,
    )
    assert seen.found[0].check == "disk" and len(seen.found[0].detail) == check_runner.DETAIL_MAX


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"core dumped", b"[]", b"{}", b"[" * 100_000, b"\xff\xfe"),
        *(b'{"version": 1, "findings": []}', b'{"version": 1, "findings": [{"type": "finding"}]}'),
    ],
)
def test_nonsense_is_no_answer(text: bytes) -> None:
    with pytest.raises(CheckFailedError):
        read(text)


def test_a_check_that_fails_is_unknown_and_keeps_what_was_found() -> None:
    before = read(report(finding("now", device="GPU 1")))
    seen = failed(failed(before, "late"), "late again")
    assert [(one.check, one.severity) for one in seen.found] == [
        (check_runner.OWN, "unknown"), ("gpu", "now"),
    ]  # fmt: skip
    assert seen.complete_checks == () and failed(None, "late").found[0].detail == "late"


@pytest.mark.parametrize(
    ("device", "visible", "rank"),
    [
        ("GPU 2", None, 2), ("gpu2", None, 2), ("0000:3b:00.0", None, 1), ("PCI:3B:00", None, 1),
        ("0001:05:00.0", ["2", "0"], 0), ("GPU 0", ["2", "0"], 1), ("GPU 1", ["2", "0"], None),
        ("GPU 1", ["GPU-6fb", "GPU-1c3"], None), ("0000:99:00.0", None, None),
        ("mlx5_0/1", None, None), ("", None, None), ("/gpu 1", None, None),
        ("GPU 1 fan", None, None),
    ],
)  # fmt: skip
def test_which_local_rank_has_the_device(
    device: str, visible: list[str] | None, rank: int | None
) -> None:
    assert local_rank(device, PCI, visible) == rank


def test_devices_that_an_earlier_launcher_left_are_left_from_the_start() -> None:
    places = [("here", "GPU 1"), ("there", "GPU 2"), ("here", "mlx5_0/1"), ("here", "GPU 3")]
    journal = [
        RankMigrated(
            worker="w1-1", finding=FindingKey(host, "gpu", "gpu-driver", "XID 79", device), t_ns=5
        )
        for host, device in places
    ]
    assert remaining_findings((Opened(generation=1, n=0), *journal), "here") == {1, 3}
    assert remaining_findings((), "here") == set()


# --- real processes ---

pytestmark = pytest.mark.process
FAMILY = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                         start_new_session=True, stdout=subprocess.DEVNULL)
open({path!r}, "w").write(str(child.pid))
os.close(1)
child.wait()
"""


def looking(stage: Stage, code: str, deadline_s: float = 20.0) -> CheckProcess:
    command = [sys.executable, "-c", code]
    return CheckProcess(command, stage.root / "health", deadline_s, set())


def answer(stage: Stage, code: str, deadline_s: float = 20.0) -> bytes:
    return asyncio.run(looking(stage, code, deadline_s).look())


def test_its_answer_is_read_whole(stage: Stage) -> None:
    assert answer(stage, "print('x' * 300_000, end='')") == b"x" * 300_000


def test_what_it_remembers_is_its_own_whatever_the_umask_is(stage: Stage) -> None:
    """A check uses no directory that the group may write to."""
    before = os.umask(0o002)
    try:
        answer(stage, "print(1)")
    finally:
        os.umask(before)
    refuse_shared_directory(stage.root / "health")


def test_one_that_says_nothing_is_quoted(stage: Stage) -> None:
    with pytest.raises(CheckFailedError, match="exit code 2: outlast: no such key"):
        answer(stage, "import sys; sys.exit(print('outlast: no such key', file=sys.stderr) or 2)")


def test_one_that_never_ends_its_answer_is_cut_off(stage: Stage) -> None:
    with pytest.raises(CheckFailedError, match="more than"):
        answer(stage, "while True: print('x' * 100_000)")


def test_one_that_is_late_is_killed_and_the_loop_goes_on(stage: Stage) -> None:
    async def scene() -> int:
        ticks = 0
        task = asyncio.create_task(looking(stage, "import signal; signal.pause()", 0.3).look())
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(CheckFailedError, match="no answer within"):
            task.result()
        return ticks

    assert asyncio.run(scene()) > 3


def test_one_that_cannot_be_started_is_told(stage: Stage) -> None:
    (stage.root / "health").write_text("a file")
    with pytest.raises(CheckFailedError, match="cannot be started"):
        answer(stage, "print(1)")


def test_cancelled_it_leaves_nobody(stage: Stage) -> None:
    become_subreaper()
    code = FAMILY.format(path=str(stage.root / "child")).replace("os.close(1)\n", "")

    async def scene() -> None:
        task = asyncio.create_task(looking(stage, code).look())
        await stage.eventually_async(lambda: stage.pid_in("child"), "started")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert not stage.alive(stage.pid_in("child"))


def test_with_the_answer_there_its_children_go_too(stage: Stage) -> None:
    become_subreaper()
    code = "print('said', flush=True)\n" + FAMILY.format(path=str(stage.root / "child"))
    assert answer(stage, code) == b"said\n"
    assert not stage.alive(stage.pid_in("child"))


def played(
    stage: Stage,
    flags: list[str],
    act: Callable[[WorkerPool, list[messages.NodeChecked]], Awaitable[None]],
) -> None:
    script = stage.script("tell('up')\nsignal.pause()")

    async def scene(crew: WorkerPool, _record: object) -> None:
        said: list[messages.NodeChecked] = []
        looks = CheckRunner(crew, said.append)
        task = asyncio.create_task(looks.run())
        try:
            await act(crew, said)
        finally:
            task.cancel()
            await asyncio.wait({task})

    stage.play(stage.plan(script, "--nproc-per-node=2", *flags), scene)


def settings(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> str:
    """A check of one's own that fires while a file is there."""
    (stage.root / "own_checks.py").write_text(
        "from pathlib import Path\n"
        "from outlast.health.check_contract import Check, Probe, Observation as Said, Sample\n"
        "class Flag(Sample, frozen=True):\n"
        "    there: bool\n"
        f"def take(): return Flag(there=Path({str(stage.root / 'flag')!r}).exists())\n"
        "def judge(sample, about):\n"
        "    yield Said('drain' if sample.there else 'healthy', 'a flag', device='GPU 1')\n"
        "CHECKS = Check('flag', 'gpu-memory', Flag, lambda settings: [Probe('', take)], judge)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(stage.root))
    path = stage.root / "check.toml"
    path.write_text('own = ["own_checks:CHECKS"]\n[profiles]\nperiodic = ["flag"]\n')
    return str(path)


def test_the_real_check_finds_and_clears(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--check-every=50ms", f"--check-settings={settings(stage, monkeypatch)}"]
    flag = stage.root / "flag"
    flag.touch()

    async def act(crew: WorkerPool, said: list[messages.NodeChecked]) -> None:
        worker = crew.start(WorkerPost("w1-1", 1, "here", 1, 0))
        await stage.eventually_async(lambda: said, "the first check")
        (one,) = said[0].found
        assert (one.severity, one.device, one.worker) == ("drain", "GPU 1", worker.name)
        assert crew.unwell == set(), "nobody asked to leave"
        flag.unlink()
        await stage.eventually_async(lambda: not said[-1].found, "clear")
        assert said[-1].completed == ("flag", check_runner.OWN)

    played(stage, flags, act)


def test_who_is_to_leave_a_device_is_not_followed_by_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--check-every=1h", f"--check-settings={settings(stage, monkeypatch)}"]
    (stage.root / "flag").touch()

    async def act(crew: WorkerPool, said: list[messages.NodeChecked]) -> None:
        await stage.eventually_async(lambda: said, "the first check")
        assert crew.unwell == {1} and said[0].found[0].worker == ""
        ranks = [crew.start(WorkerPost(f"w1-{k}", -1, "here", 1, 0)).local_rank for k in range(4)]
        assert ranks == [2, 3, 0, 1]

    played(stage, [*flags, "--migrate-on=drain", "--spares=2"], act)


def test_a_check_that_cannot_run_is_unknown_each_time_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_runner, "command", lambda *_: [str(stage.root / "no_such_program")])

    async def act(_crew: WorkerPool, said: list[messages.NodeChecked]) -> None:
        await stage.eventually_async(lambda: len(said) > 2, "three checks")
        assert said[0] == said[1] == said[2] and said[0].completed == ()
        (one,) = said[0].found
        assert isinstance(one, Warned) and (one.check, one.severity) == (
            check_runner.OWN,
            "unknown",
        )
        assert "no_such_program" in one.detail

    played(stage, ["--check-every=10ms"], act)
