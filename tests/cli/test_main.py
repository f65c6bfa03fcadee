"""Command line: output, streams, exit codes and imports."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.telemetry.synthetic_run import SyntheticRun

import outlast
from outlast import errors
from outlast.cli import main as cli
from outlast.cli.main import code_of, main
from outlast.events import RunStarted, Scheduled, WorkerSpawned
from outlast.telemetry import event_store, run_watch
from outlast.telemetry.event_store import EventWriter, life_of

COMMANDS = ("events", "explain", "summary")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "100")
    SyntheticRun(tmp_path / "run").start().steps(5).killed(2).steps(5).end()
    return tmp_path / "run"


def outlast_process(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "outlast", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{outlast.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command_and_exit_code(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for said in ("run", "demo", *COMMANDS, "0: done", "2: wrong usage", "4: interrupted"):
        assert said in text


def test_summary(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert "rank 2 was killed by SIGKILL in step 6: replace" in text
    assert "\x1b" not in text  # no colour into a pipe
    assert main(["summary", str(run_dir), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["steps"], found["committed_steps_lost"]) == ("done", 10, 0)


def test_explain(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run_dir), "1"]) == 0
    assert "w1-2 was replaced by w1-4" in capsys.readouterr().out
    assert main(["explain", str(run_dir), "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    (found,) = explained["incidents"]
    assert found["phases_ms"]["join"] == 400 and explained["saves"] is None
    assert main(["explain", str(run_dir), "7"]) == errors.EXIT_USAGE
    assert "no incident 7" in capsys.readouterr().err


def test_explain_prints_the_save_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = SyntheticRun(tmp_path).start().steps(1)
    for disk in (4, 240):
        story.say(Scheduled(t_ns=story.t_ns, memory=1, disk=disk, why=f"since {disk} [is] best"))
    story.steps(1).end()
    assert main(["explain", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "copies in memory every step, checkpoints every 240 steps" in text
    assert "since 240 [is] best" in text and "since 4" not in text
    assert main(["explain", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["saves"]["disk"] == 240


def test_explain_where_nothing_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SyntheticRun(tmp_path).start().steps(1).end()
    assert main(["explain", str(tmp_path)]) == 0
    assert "no failure occurred" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "1"]) == errors.EXIT_USAGE
    assert "no failure occurred" in capsys.readouterr().err


def test_events(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "RunStarted" in lines[0] and "RunEnded" in lines[-1]
    noticed = next(line for line in lines if "Noticed" in line)
    assert "how=pidfd" in noticed and "<killed rank=2 worker=w1-2: rank 2 was killed>" in noticed
    assert main(["events", str(run_dir), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == len(lines)
    assert [event["t_ns"] for event in found] == sorted(event["t_ns"] for event in found)


def test_following_ends_with_the_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is over is shown whole; one that was taken up again is followed to its end."""
    assert main(["events", str(run_dir), "--follow"]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert "RunEnded" in whole[-1]
    story = SyntheticRun(run_dir)
    story.term, story.t_ns = 1, 1_760_000_100_000_000_000
    story.start(resumed_n=10, resumed_step=10)
    codes: list[int] = []
    follower = threading.Thread(
        target=lambda: codes.append(main(["events", str(run_dir), "--follow"]))
    )
    follower.start()
    story.steps(1).end()
    follower.join(30)
    assert codes == [0]
    lines = capsys.readouterr().out.splitlines()
    assert sum("RunEnded" in line for line in lines) == 2
    assert main(["events", str(run_dir)]) == 0  # another writer's events may come a poll later
    assert sorted(lines) == sorted(capsys.readouterr().out.splitlines())


def test_following_a_dead_run_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = SyntheticRun(tmp_path, host=socket.gethostname()).start().steps(2)
    story.close()
    (tmp_path / "lock").write_text("1\n")  # nobody holds it
    codes: list[int] = []
    follower = threading.Thread(
        target=lambda: codes.append(main(["events", str(tmp_path), "--follow"])), daemon=True
    )
    follower.start()
    follower.join(30)
    assert codes == [0]
    captured = capsys.readouterr()
    assert "PhaseDone" in captured.out
    assert captured.err.count("the launcher died before the run ended") == 1


def test_following_waits_for_a_living_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_watch, "LOOK_S", 0.0)
    story = SyntheticRun(tmp_path, host=socket.gethostname()).start().steps(2)
    looked = threading.Event()

    def look(run_dir: Path, spawned: list[WorkerSpawned]) -> str:
        looked.set()
        return life_of(run_dir, spawned)

    monkeypatch.setattr(event_store, "life_of", look)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        codes: list[int] = []
        follower = threading.Thread(
            target=lambda: codes.append(main(["events", str(tmp_path), "--follow"])), daemon=True
        )
        follower.start()
        assert looked.wait(30) and follower.is_alive()
        story.end()
        follower.join(30)
    assert codes == [0]
    captured = capsys.readouterr()
    assert "RunEnded" in captured.out.splitlines()[-1] and "died" not in captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_no_run_there(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == errors.EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere" in " ".join(captured.err.split()) and "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["events"], ["events", "x", "--frob"], ["explain", "x", "one"], ["--frob"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == errors.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert "outlast" in captured.err


def test_a_run_that_has_only_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = EventWriter(tmp_path / "events", "launcher")
    writer.emit(RunStarted(t_ns=1, run="r", term=1, world=1, spares=0, script="s", args=()))
    writer.close()
    assert main(["summary", str(tmp_path)]) == 0
    assert "no end recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("x"), errors.EXIT_USAGE),
        (errors.ConfigError("x"), errors.EXIT_USAGE),
        (errors.GaveUpError("x"), errors.EXIT_GAVE_UP),
        (errors.RunDirError("x"), errors.EXIT_USER_ERROR),
        (errors.CorruptionError("x"), errors.EXIT_USER_ERROR),
    ],
)
def test_exit_codes_of_errors(error: errors.OutlastError, code: int) -> None:
    assert code_of(error) == code


def test_run_gets_its_flags_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="`outlast run` needs torch")
    from outlast.cli import run

    seen: list[list[str]] = []

    def record(argv: list[str]) -> int:
        seen.append(argv)
        return 4

    monkeypatch.setattr(run, "run", record)
    given = ["--nproc_per_node=2", "-m", "pkg", "--", "--help", "--json"]
    assert main(["run", *given]) == 4
    assert seen == [given]


@pytest.mark.parametrize(
    ("error", "asked", "extra"),
    [
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "run", "run"),
        (ModuleNotFoundError("no", name="torch.distributed"), "run", "run"),
        (ModuleNotFoundError("no", name="matplotlib.axes"), "demo", "figures"),
        (ModuleNotFoundError("no", name="numba"), "plan", "plan"),
        (ModuleNotFoundError("no", name="matplotlib"), "plan", "plan,figures"),
    ],
)
def test_a_missing_extra_names_its_install_command(
    error: ImportError,
    asked: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert main([asked, "compare"]) == errors.EXIT_USAGE
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"pip install 'outlast[{extra}]'" in said


def test_our_own_broken_import_is_a_bug_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise ModuleNotFoundError("no", name="outlast.nowhere")

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(ModuleNotFoundError):
        main(["run"])


@pytest.mark.process
def test_a_broken_pipe_is_silent(run_dir: Path) -> None:
    process = outlast_process("events", str(run_dir), "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # the reader is gone before the first line
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(30), said) == (0, b"")


def test_many_events_for_a_full_disk(tmp_path: Path) -> None:
    """More of them than a buffer takes, so that it is a write that fails and not the last flush."""
    writer = EventWriter(tmp_path / "events", "launcher")
    for t_ns in range(1, 2000):
        writer.emit(RunStarted(t_ns=t_ns, run="r", term=1, world=1, spares=0, script="s", args=()))
    writer.close()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "outlast", "events", str(tmp_path)],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == errors.EXIT_USER_ERROR and "Traceback" not in done.stderr
    assert "could not be printed in full" in done.stderr


@pytest.mark.parametrize("words", [["summary"], ["summary", "--json"], ["explain"]])
def test_a_closed_stdout_changes_no_exit_code(
    words: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([*words, str(run_dir)]) == 0


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_but_run_imports_torch(command: str, run_dir: Path) -> None:
    code = (
        "import sys; from outlast.cli.main import main\n"
        f"code = main([{command!r}, {str(run_dir)!r}])\n"
        "heavy = {'torch', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.process
def test_colour_only_where_it_is_wanted(run_dir: Path) -> None:
    for extra, coloured in (({}, False), ({"FORCE_COLOR": "1"}, True)):
        environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")}
        done = subprocess.run(
            [sys.executable, "-m", "outlast", "summary", str(run_dir)],
            capture_output=True,
            timeout=60,
            check=True,
            env={**environment, **extra},
        )
        assert (b"\x1b[" in done.stdout) == coloured


CONCLUDE = """
import sys
from pathlib import Path
from outlast.cli import main as cli
from outlast.cli import run as command
from outlast.controller.inputs import EndRun as End
from outlast.events import Fault

code, run_dir, flags = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
cause = Fault(kind="killed", detail="gone") if code else None
end = End(outcome="gave_up" if code else "done", exit_code=code, cause=cause)
print("a rank's last line")
command.launch = lambda plan, show: (end, run_dir)
sys.exit(cli.main(["run", *flags, "--nproc-per-node=1", __file__]))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("closed", "flags", "code"),
    [
        (("stdout",), [], 0),
        (("stdout",), ["--json"], 3),
        (("stdout", "stderr"), [], 4),
        (("stdout", "stderr"), ["--json"], 0),
    ],
)
def test_a_closed_pipe_leaves_the_runs_exit_code(
    code: int, flags: list[str], closed: tuple[str, ...], run_dir: Path
) -> None:
    pytest.importorskip("torch", reason="`outlast run` needs torch")
    script = run_dir / "conclude.py"
    script.write_text(CONCLUDE)
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, str(script), str(code), str(run_dir), *flags],
        env=buffered,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `| tee log` does whose tee was killed
    said = "" if "stderr" in closed else process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == code
    assert "Traceback" not in said and "Exception ignored" not in said


def test_books_that_do_not_add_up_leave_the_runs_exit_code(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="`outlast run` needs torch")
    from outlast.cli import run
    from outlast.controller.inputs import EndRun

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug in the books")

    monkeypatch.setattr(run, "_summarise", fail)
    run.conclude(EndRun(outcome="interrupted", exit_code=4), run_dir, as_json=False)
    assert "no summary: ZeroDivisionError: a bug in the books" in capsys.readouterr().err
