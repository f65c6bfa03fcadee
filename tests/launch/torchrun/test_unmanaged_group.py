"""Scripts without `init()`: restarts as by torchrun, failures as incidents."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.launch.protocol_workers import Theatre, actor, events_of, theatre, words

from outlast import events
from outlast.launch.torchrun.unmanaged_group import root_cause
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history
from outlast.telemetry.run_summary import summarise

__all__ = ["theatre"]  # the fixture
pytestmark = pytest.mark.process
PY_SPY = """#!/bin/sh
echo '[{"thread_name": "MainThread", "frames": [
{"name": "wait", "filename": "/lib/python3/c10d.py", "short_filename": "c10d.py", "line": 7},
{"name": "train", "filename": "/home/script.py", "short_filename": "script.py", "line": 9}]}]'
"""


def test_success(theatre: Theatre) -> None:
    text = "print('rank', os.environ['RANK'], sys.argv[1:])\nprint('oh', file=sys.stderr)"
    script = theatre.stage.script(text)
    code, out, err = theatre.go(script, "--nproc-per-node", "2", "--spares", "1")
    assert code == 0
    assert out.count("rank 0 []") == out.count("rank 1 []") == 1 and err.count("oh\n") == 2
    assert "never called outlast.init()" in words(err) and "outlast" not in out
    assert not (theatre.run_dir / "logs/spare").exists()


def test_failure_is_told_once_and_stops_the_others(theatre: Theatre) -> None:
    text = """
if os.environ["RANK"] == "1":
    raise RuntimeError("no such luck")
tell("other")
signal.pause()
"""
    code, _, err = theatre.go(theatre.stage.script(text), "--nproc-per-node", "2")
    assert code == 1
    framed = err.split("-" * 72)[1]
    assert "rank 1" in framed and framed.count("RuntimeError: no such luck") == 1


def test_restarts_on_a_fresh_port(theatre: Theatre) -> None:
    text = """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, "port", os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    sys.exit(5 if attempt < 2 else 0)
while attempt < 2:
    signal.pause()
"""
    script = theatre.stage.script(text)
    code, _, err = theatre.go(script, "--nproc-per-node", "2", "--max-restarts", "2")
    assert code == 0 and "restart 2 of 2" in err
    logs = sorted((theatre.run_dir / "logs/0").glob("*/stdout.log"))
    said = [path.read_text().split() for path in logs]
    assert sorted(words[1] for words in said) == ["0", "1", "2"]
    assert len({words[3] for words in said}) > 1


def test_restarts_are_limited(theatre: Theatre) -> None:
    code, _, err = theatre.go(theatre.stage.script("sys.exit(5)"), "--max-restarts", "1")
    assert code == 1 and "exit code 5" in err
    assert len(list((theatre.run_dir / "logs/0").iterdir())) == 2
    first, second = incidents(read_history(theatre.run_dir))
    assert (first.rung, first.state, first.step) == ("relaunch", "recovered", -1)
    assert (second.rung, second.state, second.is_managed) == ("stop", "stopped", False)
    summary = summarise(theatre.run_dir)
    assert (summary.steps, summary.committed_steps_lost, summary.goodput) == (None, None, None)
    assert summary.cause and summary.cause.step == -1, "no step of such a script is known"


@pytest.mark.parametrize("text", ["import nosuchmodule", "def broken(:"])
def test_no_restart_is_spent_on_what_would_fail_again(theatre: Theatre, text: str) -> None:
    script = theatre.stage.script("")
    script.write_text(text)
    code, _, err = theatre.go(script, "--max-restarts", "3")
    assert code == 1 and "3 restarts left unused" in err
    assert len(list((theatre.run_dir / "logs/0").iterdir())) == 1
    (found,) = incidents(read_history(theatre.run_dir))
    assert found.rung == "stop" and "3 restarts left unused" in found.reason


def test_a_crash_loop_is_ended_and_framed(theatre: Theatre) -> None:
    """The log's end, and the decision with its reason, stand in one frame."""
    text = """
print(f"at {time.monotonic()}: no such device", file=sys.stderr)
os.abort()
"""
    code, _, err = theatre.go(theatre.stage.script(text), "--max-restarts", "9")
    framed = err.split("-" * 72)[1]
    assert code == 1 and "killed by SIGABRT" in framed and "no such device" in framed
    assert "decision: stop: the same failure ended 3 attempts in a row" in framed
    assert "; 7 restarts left unused" in framed
    assert len(list((theatre.run_dir / "logs/0").iterdir())) == 3


@pytest.mark.parametrize(
    ("code", "flags", "started"),
    [
        (93, (), 1),
        (17, (), 1),
        (16, (), 2),
        (42, ("--policy", "MINE"), 1),
        (93, ("--policy", "MINE"), 2),
    ],
)
def test_exit_codes_name_classes_that_policies_answer(
    theatre: Theatre, tmp_path: Path, code: int, flags: tuple[str, ...], started: int
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[exit_codes]\n42 = "license_lost"\n[license_lost]\nrungs = ["stop"]\n'
        '[no_restart]\nrungs = ["restart", "stop"]\n[default]\nrungs = ["restart", "stop"]\n'
    )
    named = [str(mine) if word == "MINE" else word for word in flags]
    saves = ["--checkpoint-every", "5"] if named else []
    script = theatre.stage.script(f"sys.exit({code})")
    assert theatre.go(script, "--max-restarts", "1", *named, *saves)[0] == 1
    assert len(list((theatre.run_dir / "logs/0").iterdir())) == started
    found = incidents(read_history(theatre.run_dir))[-1]
    assert ("does not recover from the class" in found.reason) == (started == 1)


def test_the_error_file_is_read(theatre: Theatre) -> None:
    text = """
import json
recorded = {"message": "ValueError: shard 7 is empty", "extraInfo": {"py_callstack": "",
    "timestamp": "1700000000"}}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": recorded}, file)
os._exit(3)
"""
    code, _, err = theatre.go(theatre.stage.script(text))
    assert code == 1 and "ValueError: shard 7 is empty" in err.split("-" * 72)[1]


def test_a_broken_connection_is_the_echo_of_who_ends_later(theatre: Theatre) -> None:
    """The rank that fails may take longer to exit than those that lose their connection to it."""
    text = """
if os.environ["RANK"] == "0":
    tell("first")
    raise RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
wait_for(lambda: os.path.exists(f"{ROOT}/first"))
wait_for(lambda: not os.path.exists("/proc/" + open(f"{ROOT}/first").read()))
raise KeyError("moedl")
"""
    code, _, err = theatre.go(theatre.stage.script(text), "--nproc-per-node", "2")
    framed = err.split("-" * 72)[1]
    assert code == 1 and "KeyError" in framed and "rank 1" in framed
    (found,) = incidents(read_history(theatre.run_dir))
    assert len(found.faults) == 2


def test_a_group_that_stands_still_is_reported_and_restarted(
    theatre: Theatre, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.pause()
"""
    flags = ("--limit", "hang_floor_s=0.2", "--limit", "hang_ceiling_s=3", "--max-restarts", "1")
    py_spy = theatre.stage.root / "py-spy"
    py_spy.write_text(PY_SPY)
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{py_spy.parent}:{os.environ['PATH']}")
    code, _, err = theatre.go(theatre.stage.script(text), "--nproc-per-node", "2", *flags)
    where = "ranks 0, 1 in wait (c10d.py:7), called from train (script.py:9)"
    assert code == 0 and "a hang, or a long wait. After 3 s" in err and err.count(where) >= 2
    (found,) = incidents(read_history(theatre.run_dir))
    assert (found.cause.kind, found.cause.seat, found.rung) == ("hung", -1, "relaunch")
    assert where in found.cause.detail
    stacks = sorted(theatre.run_dir.glob("traces/*/rank-1.txt"))
    assert stacks and "train (/home/script.py:9)" in stacks[0].read_text()


def test_a_rank_that_others_wait_for_is_reported(theatre: Theatre) -> None:
    text = """
until_s = time.monotonic() + 9
while os.environ["RANK"] == "1" and time.monotonic() < until_s:
    pass
if os.environ["RANK"] == "0":
    wait_for(lambda: os.path.exists(f"{ROOT}/done"))
tell("done")
"""
    flags = ("--limit", "hang_floor_s=0.2", "--limit", "hang_ceiling_s=2")
    code, _, err = theatre.go(theatre.stage.script(text), "--nproc-per-node", "2", *flags)
    assert code == 0 and "1 rank of 2 (0 first) waited for" in err and "while others compute" in err


def test_a_group_that_stands_still_is_left_alone_without_restarts(theatre: Theatre) -> None:
    text = 'wait_for(lambda: os.path.exists(f"{ROOT}/go"))'
    flags = ("--limit", "hang_floor_s=0.2", "--limit", "hang_ceiling_s=2")
    launcher = theatre.start(theatre.stage.script(text.replace("20", "60")), *flags)

    def is_reported() -> bool:
        notes = events_of(theatre, events.Note) if any(theatre.run_dir.glob("events/*")) else []
        return any("left alone" in getattr(note, "text", "") for note in notes)

    theatre.stage.eventually(is_reported, "the standstill is reported")
    (theatre.stage.root / "go").write_text("")
    code, _, _ = theatre.end(launcher)
    assert code == 0 and not incidents(read_history(theatre.run_dir))


def test_root_cause_prefers_what_is_no_echo() -> None:
    echo = events.Fault(
        kind="exited",
        detail="ended by itself with exit code 1",
        seat=0,
        traceback="RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:2",
    )
    own = events.Fault(kind="killed", detail="killed by SIGKILL", seat=3, signal=9)
    assert root_cause([]) is None and root_cause([echo]) is echo
    assert root_cause([echo, own, echo]) is own


def test_a_script_can_say_goodbye(theatre: Theatre) -> None:
    text = """
signal.signal(signal.SIGINT, lambda *_: (tell("goodbye"), sys.exit(0)))
tell("ready")
while True:
    signal.pause()
"""
    launcher = theatre.start(theatre.stage.script(text))
    theatre.told("ready")
    launcher.send_signal(signal.SIGINT)
    code, _, _ = theatre.end(launcher)
    assert code == 4 and theatre.stage.pid_in("goodbye")


def test_some_with_init_and_some_without(theatre: Theatre) -> None:
    text = """
if os.environ["RANK"] == "0":
    tell("first")
    sys.exit(0)
wait_for(lambda: os.path.exists(f"{ROOT}/first"))
wait_for(lambda: not os.path.exists("/proc/" + open(f"{ROOT}/first").read()))
"""
    script = theatre.stage.script(text + actor())
    code, _, err = theatre.go(script, "--nproc-per-node", "2")
    assert code == 1 and "all ranks must call it, or none" in err


def test_what_raises_above_init_is_told_whatever_the_others_do(theatre: Theatre) -> None:
    """The others' Hellos lie in their sockets by the time its death is looked at."""
    above = """
if os.environ["RANK"] == "1":
    tell("ready")
    wait_for(lambda: os.path.exists(f"{ROOT}/raise"))
    raise RuntimeError("no such luck")
tell("waiting")
wait_for(lambda: os.path.exists(f"{ROOT}/raise"))
"""
    said = actor().replace("if seat < 0:", "tell('said')\nif seat < 0:")
    script = theatre.stage.script(above + said)
    launcher = theatre.start(script, "--nproc-per-node", "2", "--max-restarts", "3")
    pid = theatre.told("ready")
    theatre.told("waiting")
    launcher.send_signal(signal.SIGSTOP)
    (theatre.stage.root / "raise").write_text("")
    theatre.told("said")
    theatre.stage.eventually(lambda: not theatre.stage.alive(pid), "it has raised")
    launcher.send_signal(signal.SIGCONT)
    code, _, err = theatre.end(launcher)
    framed = err.split("-" * 72)[1]
    assert code == 1 and "RuntimeError: no such luck" in framed and "rank 1" in framed


def test_interrupted_while_the_script_starts(theatre: Theatre) -> None:
    """A script that does not end when asked to, but comes to its init()."""
    above = """
signal.signal(signal.SIGTERM, lambda *_: tell("asked"))
tell("ready")
wait_for(lambda: os.path.exists(f"{ROOT}/asked"))
"""
    launcher = theatre.start(theatre.stage.script(above + actor()), "--limit", "stop_s=2")
    theatre.told("ready")
    launcher.send_signal(signal.SIGTERM)
    code, _, err = theatre.end(launcher)
    assert code == 4 and "all ranks must call it" not in err
