"""Notices to a running job: a move between two steps, and a save and an end before a deadline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outlast import events
from outlast.errors import RunDirError
from outlast.telemetry.event_store import read_events

if TYPE_CHECKING:
    from tests.end_to_end.conftest import Outcome
from tests.end_to_end.conftest import WORLD, Runner, same, wait_for

pytestmark = pytest.mark.process


def drain(run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "outlast", "drain", str(run_dir), "--timeout=100", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def at_step_8(hold: Path) -> None:
    for rank in range(WORLD):
        wait_for(hold.with_suffix(f".{rank}").exists, f"rank {rank} at step 8")


def seen(run_dir: Path, kind: type[events.Event], text: str = "") -> Callable[[], bool]:
    """Return whether an event of this kind, with this text in it, is there."""
    return lambda: any(isinstance(e, kind) and text in str(e) for e in read_events(run_dir))


def test_a_rank_moves_between_two_steps(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    hold, run_dir = tmp_path / "hold", tmp_path / "run"
    slow = ",".join(f"between:-1:{step}:1" for step in range(8, 14))
    process = runner.start("--spares=1", job=(f"--hold={hold}", f"--wait={slow}"))
    at_step_8(hold)
    command = drain(run_dir, "--rank=1", "--reason=a loud fan", "--by=100s")
    wait_for(seen(run_dir, events.Warned, "a loud fan"), "the notice in the events")
    hold.touch()
    outcome = runner.end(process)
    text = command.communicate(timeout=60)[0]
    assert command.returncode == 0 and "moved before phase" in text, text
    same(outcome, undisturbed)
    (one,) = outcome.summary["incidents"]
    assert (one["rung"], one["cause"], one["drain"]) == ("migrate", "requested", False)
    assert one["committed_steps_lost"] == 0
    reports = {e.seat: e for e in outcome.events if isinstance(e, events.Reported)}
    assert reports[1].state == "idle", "it stood between two phases"
    (decided,) = [e for e in outcome.events if isinstance(e, events.Decided)]
    assert decided.n == reports[1].n and {e.n for e in reports.values()} == {decided.n}
    assert [(seat, new) for seat, _, new in decided.replaced] == [(1, "w1-4")]
    refused = [e for e in outcome.events if isinstance(e, events.AttemptRefused)]
    assert all(e.seat != 1 for e in refused if e.generation > 1)
    assert "a notice said that it had to leave" in outcome.explain()
    notes = [e.text for e in outcome.events if isinstance(e, events.Note)]
    why = "since the script does not promise hot_spares"
    assert f"w1-4: built while the ranks wait for the move, {why}" in notes


@pytest.mark.extended
def test_a_spare_builds_its_model_before_a_move_while_the_ranks_train(tmp_path: Path) -> None:
    """A fresh spare, in place of one that was killed, is not ready when the notice comes."""
    script, job = Path(__file__).with_name("jobs") / "hot_job.py", ("--steps=400",)
    (tmp_path / "plain").mkdir(), (tmp_path / "moved").mkdir()
    expected = Runner(tmp_path / "plain", 2).run(job=job, script=script)
    runner, run_dir = Runner(tmp_path / "moved", 2), tmp_path / "moved" / "run"
    hold, gate = tmp_path / "hold", tmp_path / "gate"
    job = (f"--hold={hold}", f"--gate={gate}", *job)
    process = runner.start("--spares=1", job=job, script=script)
    for rank in range(2):
        wait_for(hold.with_suffix(f".{rank}").exists, f"rank {rank} at step 5")
    wait_for(seen(run_dir, events.Note, "prepared up to"), "the first spare")
    gate.touch()
    spawned = [e for e in read_events(run_dir) if isinstance(e, events.WorkerSpawned)]
    (pid,) = [e.pid for e in spawned if e.seat < 0]
    os.kill(pid, signal.SIGKILL)
    wait_for(seen(run_dir, events.WorkerWarm, "w1-3"), "the next spare")
    hold.touch()
    command = drain(run_dir, "--rank=1")
    wait_for(seen(run_dir, events.Warned, "operator"), "the notice in the events")

    def step() -> int:
        return max(e.step for e in read_events(run_dir) if isinstance(e, events.PhaseDone))

    first = step()
    wait_for(lambda: step() >= first + 15, "steps of ranks that do not wait")
    assert not seen(run_dir, events.GenerationClosed)()
    gate.unlink()
    text = command.communicate(timeout=60)[0]
    assert command.returncode == 0 and "moved before phase" in text, text
    outcome = runner.end(process)
    assert outcome.code == 0 and outcome.ranks == expected.ranks, outcome.output
    (one,) = outcome.summary["incidents"]
    assert (one["rung"], one["committed_steps_lost"]) == ("migrate", 0)
    notes = [e for e in outcome.events if isinstance(e, events.Note)]
    (ready,) = [e for e in notes if "prepared up to" in e.text and e.worker == "w1-3"]
    (closed,) = [e for e in outcome.events if isinstance(e, events.GenerationClosed)]
    assert ready.t_ns < closed.t_ns and not any("built while" in e.text for e in notes)


def test_without_a_spare_the_run_saves_ends_before_the_deadline_and_resumes(
    runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    hold, run_dir = tmp_path / "hold", tmp_path / "run"
    slow = ",".join(f"between:-1:{step}:2.5" for step in range(8, 14))
    job = (f"--hold={hold}", f"--wait={slow}")
    process = runner.start(job=job)
    at_step_8(hold)
    command = drain(run_dir, f"--host={socket.gethostname()}", "--by=16s")
    wait_for(seen(run_dir, events.Note, "the run saves now"), "the answer")
    hold.touch()
    assert process.wait(100) == 4, "it can be resumed"
    text = command.communicate(timeout=60)[0]
    assert command.returncode == 0 and "the run saves now" in text, text
    found = read_events(run_dir)
    (notice,) = [e for e in found if isinstance(e, events.Warned)]
    (end,) = [e for e in found if isinstance(e, events.RunEnded)]
    assert 15 < notice.within_s <= 16 and end.t_ns < notice.t_ns + 16 * 10**9
    assert end.cause is not None and "operator" in end.cause.detail
    saves = [e.step for e in found if isinstance(e, events.CheckpointSaved)]
    assert len(saves) == 2 and saves[0] == 7 < saves[1] == end.step, "at once, and at the end"
    outcome = runner.end(runner.start(job=job))
    same(outcome, undisturbed)


@pytest.mark.extended
@pytest.mark.parametrize("receiver", ["worker", "launcher"])
def test_a_signal_to_one_process_of_a_host_is_a_notice(
    receiver: str, runner: Runner, undisturbed: Outcome, tmp_path: Path
) -> None:
    """In an evaluation, and without a spare: the run saves, and ends before the time is over."""
    hold, run_dir = tmp_path / "hold", tmp_path / "run"
    hold.touch()
    slow = ",".join(f"forward:-1:{step}:2.5" for step in range(10, 14))
    job = (f"--hold={hold}", f"--wait=evaluate:-1:10:3,{slow}")
    flags = ("--notice-signal=TERM,USR1", "--notice-time=12s")
    process = runner.start(*flags, job=job)

    def done(step: int) -> bool:
        with suppress(RunDirError):  # it has not started yet
            found = [e for e in read_events(run_dir) if isinstance(e, events.PhaseDone)]
            return {e.seat for e in found if e.step == step} == set(range(WORLD))
        return False

    wait_for(lambda: done(10), "step 10, and the evaluation behind it")
    spawned = [e for e in read_events(run_dir) if isinstance(e, events.WorkerSpawned)]
    (pid,) = [e.pid for e in spawned if e.seat == 2]
    os.kill(process.pid if receiver == "launcher" else pid, signal.SIGTERM)
    assert process.wait(100) == 4, (tmp_path / "run.txt").read_text()
    found = read_events(run_dir)
    (notice,) = [e for e in found if isinstance(e, events.Warned)]
    (end,) = [e for e in found if isinstance(e, events.RunEnded)]
    assert (notice.check, notice.code) == ("signal", "SIGTERM") and receiver[0] in notice.detail
    assert end.t_ns < notice.t_ns + 12 * 10**9
    assert [e for e in found if isinstance(e, events.WorkerLost) and e.fault.signal] == []
    same(runner.end(runner.start(*flags, job=job)), undisturbed)
