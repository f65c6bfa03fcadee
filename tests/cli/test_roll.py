"""`outlast roll` where nothing may leave, and where it stands."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR
from outlast.events import (
    AnyEvent,
    Fault,
    NodeReleased,
    RunEnded,
    RunStarted,
    WorkerLost,
    WorkerSeated,
    WorkerSpawned,
    WorkerWarm,
)
from outlast.launch import torchrun_arguments
from outlast.launch.notices import drain_requests, roll_record
from outlast.launch.notices.roll_record import RollingHost, RollRecord
from outlast.launch.terms.run_identity import RunningJob
from outlast.telemetry.event_store import EventClock, EventWriter

STARTED = RunStarted(t_ns=1, run="r", term=1, world=2, spares=1, script="train.py", args=())


def worker(name: str, host: str, seat: int = -1, *, warm: bool = True) -> list[AnyEvent]:
    found: list[AnyEvent] = [WorkerSpawned(t_ns=2, worker=name, seat=seat, pid=7, host=host)]
    found += [WorkerWarm(t_ns=3, worker=name)] if warm else []
    found += [WorkerSeated(t_ns=4, worker=name, seat=seat, generation=1)] if seat >= 0 else []
    return found


PLACES = (
    STARTED,
    *worker("w1-0", "n1", 0),
    *worker("w1-1", "n2", 1),
    *worker("w1-2", "n3"),
)


def write_run(
    folder: Path, events: tuple[AnyEvent, ...] = PLACES, nnodes: str = "2:3", home: str = ""
) -> Path:
    """Write what a run of several hosts leaves in its run directory."""
    for event in events:
        add(folder, event)
    flags = ["--nnodes", nnodes, "--rdzv-endpoint=n1:1", f"--run-dir={folder}", __file__]
    plan = torchrun_arguments.parse(flags)
    planned = torchrun_arguments.PlanFile(cwd="/", plan=plan)
    (folder / "plan.json").write_bytes(msgspec.json.encode(planned))
    job = RunningJob(
        version=1, run="r", script="train.py", args=(), world=2, created_ns=0, term=1, home=home
    )
    (folder / "run.json").write_bytes(msgspec.json.encode(job))
    return folder


def add(folder: Path, event: AnyEvent) -> None:
    writer = EventWriter(folder / "events", f"launcher-{event.t_ns}-{id(event)}", EventClock())
    writer.emit(event)
    writer.close()


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_TOKEN", "a secret of these tests")


def output(capfd: pytest.CaptureFixture[str]) -> str:
    found = capfd.readouterr()
    return " ".join((found.out + found.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "give either --hosts or --all"),
        (("--all", "--hosts=n1"), "give either --hosts or --all"),
        (("--hosts=n1,,n2",), "one of the names is empty"),
        (("--hosts=n1,n9",), "n9: not a host of this run (hosts: n1, n2, n3)"),
        (("--hosts=n1,n1",), "n1 is there twice"),
        (("--hosts=n1", "--pause=soon"), "needs a number"),
        (("--hosts=n1", "--timeout=0"), "--timeout 0.0"),
        (("--hosts=n1", "--timeout=inf"), "--timeout inf"),
        (("--hosts=n1", "--timeout=nan"), "--timeout nan"),
        (("--cancel", "--all"), "leave out --hosts and --all"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    flags: tuple[str, ...], text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["roll", str(write_run(tmp_path)), *flags]) == EXIT_USAGE
    assert text in output(capfd) and drain_requests.read(tmp_path, pytest.fail) == []


def test_a_run_on_one_host_and_one_with_directories_of_hosts_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, own = tmp_path / "one", tmp_path / "own"
    one.mkdir(), own.mkdir()
    assert main(["roll", str(write_run(one, nnodes="1")), "--all"]) == EXIT_USAGE
    assert "the run has one host" in output(capfd)
    assert main(["roll", str(write_run(own, home="/d")), "--all"]) == EXIT_USAGE
    assert "has its own run directory" in output(capfd)


def test_ranks_without_places_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, PLACES[:-2])
    assert main(["roll", str(tmp_path), "--hosts=n2"]) == EXIT_USAGE
    text = output(capfd)
    assert "n2 has 1 rank, and the other hosts have 0 spares: its ranks have no place" in text
    assert not roll_record.exists(tmp_path)


def test_a_run_that_has_ended_or_never_begun_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    end = RunEnded(t_ns=9, outcome="done", exit_code=0, n=1, step=1)
    write_run(tmp_path, (*PLACES, end))
    assert main(["roll", str(tmp_path), "--all"]) == EXIT_USER_ERROR
    assert "the run has ended; nothing was requested" in output(capfd)
    assert main(["roll", str(tmp_path / "none"), "--all"]) == EXIT_USER_ERROR
    assert "cannot be read" in output(capfd)


def test_a_host_that_does_not_leave_in_time_is_asked_no_longer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No controller answers. The same command goes on, another one is refused."""
    write_run(tmp_path)
    assert main(["roll", str(tmp_path), "--all", "--timeout=0.6"]) == EXIT_USER_ERROR
    text = output(capfd)
    assert "n3 has not left the run within 600 ms" in text, text
    assert "the roll stands (pending: n1, n2; leaving: n3); the same command goes on" in text
    assert drain_requests.read(tmp_path, pytest.fail) == []
    assert main(["roll", str(tmp_path), "--hosts=n3", "--timeout=0.6"]) == EXIT_USAGE
    assert "a roll with --all has not ended" in output(capfd)
    add(tmp_path, NodeReleased(t_ns=20, host="n3"))
    fault = Fault(kind="requested", detail="n3 leaves the run")
    add(tmp_path, WorkerLost(t_ns=19, worker="w1-2", seat=-1, fault=fault))
    assert main(["roll", str(tmp_path), "--all", "--timeout=0.6", "--json"]) == EXIT_USER_ERROR
    answer = msgspec.json.decode(capfd.readouterr().out)
    assert answer["outcome"] == "stopped" and "no host has come in place of n3" in answer["text"]
    assert [one["state"] for one in answer["hosts"]] == ["pending", "pending", "away"]


def test_the_return_of_a_host_is_seen_whatever_its_clock_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    entry = RollingHost(host="n3", state="leaving", workers=("w1-2",), known=("n1", "n2", "n3"))
    record = RollRecord(run="r", driver="another", is_all=False, hosts=(entry,))
    roll_record.adopt(tmp_path, record)
    for event in (
        NodeReleased(t_ns=20, host="n3"),
        WorkerLost(t_ns=19, worker="w1-2", seat=-1, fault=Fault(kind="requested", detail="")),
        *worker("w2-0", "n3"),  # of a controller whose clock is behind
    ):
        add(tmp_path, event)
    assert main(["roll", str(tmp_path), "--hosts=n3", "--timeout=5"]) == EXIT_DONE
    text = output(capfd)
    assert (
        "going on with a roll: leaving: n3" in text and "1 host left the run and came back" in text
    )
    assert not roll_record.exists(tmp_path)


def test_only_one_roll_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    with roll_record.lock(tmp_path) as is_free:
        assert is_free
        assert main(["roll", str(tmp_path), "--all"]) == EXIT_USER_ERROR
        assert "another roll is running" in output(capfd)


def test_a_roll_that_another_command_has_taken_on_is_left_alone(tmp_path: Path) -> None:
    """A file system without locks between hosts."""
    record = RollRecord(run="r", driver="one", is_all=False, hosts=(RollingHost(host="n1"),))
    roll_record.adopt(tmp_path, record)
    roll_record.write(tmp_path, record)
    roll_record.adopt(tmp_path, msgspec.structs.replace(record, driver="other"))
    with pytest.raises(Exception, match="another command has gone on"):
        roll_record.write(tmp_path, record)


def test_a_cancelled_roll_is_forgotten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main(["roll", str(tmp_path), "--cancel"]) == EXIT_DONE
    assert "there is no roll" in output(capfd)
    entries = (RollingHost(host="n2", state="away"), RollingHost(host="n1"))
    record = RollRecord(run="r", driver="dead", is_all=False, hosts=entries)
    roll_record.adopt(tmp_path, record)
    request = drain_requests.DrainRequest(name="1", host="n2", leaves=True)
    drain_requests.write(tmp_path, request)
    assert main(["roll", str(tmp_path), "--cancel"]) == EXIT_DONE
    assert "away: n2: start the same outlast run command there" in output(capfd)
    assert not roll_record.exists(tmp_path) and not roll_record.is_cancelled(tmp_path)
    assert drain_requests.read(tmp_path, pytest.fail) == []


def test_a_damaged_record_is_named_and_can_be_removed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    (tmp_path / "roll").mkdir()
    (tmp_path / "roll" / "record").write_text("{")
    assert main(["roll", str(tmp_path), "--all"]) == EXIT_USER_ERROR
    assert "record cannot be read" in output(capfd)
    assert main(["roll", str(tmp_path), "--cancel"]) == EXIT_DONE
    assert not roll_record.exists(tmp_path)
