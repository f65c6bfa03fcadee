"""`outlast run` with real launchers and signals; no process remains."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.launch.protocol_workers import Theatre, actor, events_of, theatre, words

from outlast import events
from outlast.telemetry.segment_files import SegmentWriter

__all__ = ["theatre"]  # the fixture
pytestmark = pytest.mark.process


def test_a_killed_worker_is_replaced_and_the_run_ends(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script, "--nproc-per-node", "2", "--spares", "1", "--json")
    pid = theatre.told("open1-1")
    theatre.told("spare")
    os.kill(pid, signal.SIGKILL)
    assert theatre.told("open2-1") not in (0, pid)
    (theatre.stage.root / "finish").write_text("")
    code, out, err = theatre.end(launcher)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["outcome"] == "done" and len(summary["incidents"]) == 1
    assert summary == json.loads((theatre.run_dir / "summary.json").read_text())
    assert (theatre.run_dir / "logs/1/w1-2").is_symlink()


def test_a_stopped_worker_is_found_out_and_replaced(theatre: Theatre) -> None:
    limits = ("--limit", "hang_floor_s=1", "--limit", "hang_ceiling_s=60")
    launcher = theatre.start(theatre.stage.script(actor()), "--nproc-per-node", "2", *limits)
    pid = theatre.told("open1-0")
    theatre.told("open1-1")
    os.kill(pid, signal.SIGSTOP)
    assert theatre.told("open2-0") not in (0, pid)
    assert not theatre.stage.alive(pid)
    (theatre.stage.root / "finish").write_text("")
    code, _, err = theatre.end(launcher)
    assert code == 0 and "rank 0 was stopped" in err


def test_interrupted_then_resumed(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script, "--nproc-per-node", "2")
    theatre.told("open1-0")
    theatre.told("open1-1")
    launcher.send_signal(signal.SIGTERM)
    code, _, err = theatre.end(launcher)
    assert code == 4 and "SIGTERM" in err
    (theatre.stage.root / "finish").write_text("")
    assert theatre.go(script, "--nproc-per-node", "2")[0] == 0
    terms = events_of(theatre, events.RunStarted)
    assert [event.term for event in terms if isinstance(event, events.RunStarted)] == [1, 2]


def test_a_second_interrupt_does_not_wait_for_anybody(theatre: Theatre) -> None:
    launcher = theatre.start(theatre.stage.script(actor(drains=False)), "--limit", "stop_s=50")
    pid = theatre.told("open1-0")
    launcher.send_signal(signal.SIGINT)
    theatre.told("drain0")
    launcher.send_signal(signal.SIGINT)
    code, _, err = theatre.end(launcher)
    assert code == 4 and "everything is killed" in err and not theatre.stage.alive(pid)


def test_a_drain_that_takes_too_long_is_ended(theatre: Theatre) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup ignores it
    try:
        launcher = theatre.start(theatre.stage.script(actor(drains=False)), "--limit", "stop_s=0.3")
    finally:
        signal.signal(signal.SIGHUP, before)
    pid = theatre.told("open1-0")
    launcher.send_signal(signal.SIGHUP)
    assert theatre.end(launcher)[0] == 4 and not theatre.stage.alive(pid)


def test_nobody_survives_a_killed_launcher_and_its_run_resumes(theatre: Theatre) -> None:
    script = theatre.stage.script(actor(family=True))
    launcher = theatre.start(script, "--nproc-per-node", "2")
    names = [f"{who}{rank}" for who in ("open1-", "child", "daemon") for rank in (0, 1)]
    pids = [theatre.told(name) for name in names]
    os.kill(pids[0], signal.SIGSTOP)
    launcher.kill()
    launcher.wait(10)
    (theatre.stage.root / "finish").write_text("")
    # The next launcher waits for the warden of the last one, and needs no pause of ours.
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code == 0, err
    assert [pid for pid in pids if theatre.stage.alive(pid)] == []


def test_nobody_survives_a_killed_process_group(theatre: Theatre) -> None:
    launcher = theatre.start(theatre.stage.script(actor(family=True)))
    pids = [theatre.told(name) for name in ("open1-0", "child0", "daemon0")]
    os.killpg(launcher.pid, signal.SIGKILL)
    theatre.stage.eventually(lambda: not any(map(theatre.stage.alive, pids)), "all are dead")


def test_a_run_directory_in_use_or_of_another_job(theatre: Theatre) -> None:
    script = theatre.stage.script(actor())
    launcher = theatre.start(script)
    theatre.told("open1-0")
    code, _, err = theatre.go(script)
    assert code != 0 and f"in use by pid {launcher.pid}" in words(err)
    (theatre.stage.root / "finish").write_text("")
    assert theatre.end(launcher)[0] == 0
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code != 0 and "another job" in words(err)


def summary_of(theatre: Theatre) -> dict[str, Any]:
    return json.loads((theatre.run_dir / "summary.json").read_text())


def test_what_is_left_of_interrupted_checkpoints_goes(theatre: Theatre) -> None:
    (theatre.stage.root / "finish").write_text("")
    draft = theatre.run_dir / "checkpoints" / "step-000000007-n8-t1g1"
    draft.mkdir(parents=True)
    (draft / "shard-00000.part").write_bytes(b"half")
    assert theatre.go(theatre.stage.script(actor()))[0] == 0
    assert not draft.exists()


def test_a_journal_on_a_full_disk_is_the_one_cause(theatre: Theatre) -> None:
    ask = "    if opened and not done and os.path.exists(f'{ROOT}/share'):\n        done = True\n"
    ask += "        say(messages.SharedValueRequest(name='x'))\n"
    made = "        case messages.SharedValueMake():\n            "
    made += "say(messages.SharedValueMade(name=body.name, value=bytes(9000)))\n"
    sharer = (
        actor().replace("        case messages.Stop", made + "        case messages.Stop") + ask
    )
    journal = theatre.run_dir / "journal"
    journal.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(journal)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk takes rights that are not given here")
    try:
        launcher = theatre.start(theatre.stage.script(sharer))
        theatre.told("open1-0")
        fill(journal / "filler")
        (theatre.stage.root / "share").write_text("")
        code, _, err = theatre.end(launcher)
    finally:
        subprocess.run(["umount", "-l", str(journal)], check=True)
    [ended] = events_of(theatre, events.RunEnded)
    assert isinstance(ended, events.RunEnded) and ended.cause
    assert (ended.outcome, ended.exit_code, ended.cause.kind) == ("gave_up", 3, "storage")
    assert code == 3 and "No space left" in ended.cause.detail and ended.cause.detail in err
    assert summary_of(theatre)["cause"]["detail"] == ended.cause.detail


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def test_a_controller_that_cannot_begin_is_the_one_cause(theatre: Theatre) -> None:
    """Nobody is left behind, the warden neither: its lock would keep the next launcher out."""
    journal = SegmentWriter(theatre.run_dir / "journal", "term000001", durable=True)
    journal.append(b"no entry")
    journal.close()
    script = theatre.stage.script(actor())
    for _ in range(2):
        code, _, err = theatre.go(script)
        [*_, ended] = events_of(theatre, events.RunEnded)
        assert isinstance(ended, events.RunEnded) and ended.cause
        assert (code, ended.exit_code, ended.cause.kind) == (3, 3, "storage")
        assert "holds an entry that cannot be read" in ended.cause.detail
        assert ended.cause.detail in err


def test_wrong_use_starts_nothing(theatre: Theatre) -> None:
    script = theatre.stage.script("tell('started')")
    code, _, err = theatre.go(script, "--nnodes", "2")
    assert code == 2 and "--rdzv-endpoint HOST:PORT" in err
    assert not theatre.run_dir.exists() and not theatre.stage.pid_in("started")
