"""Events of `outlast run` as records of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.events import (
    AnyEvent,
    Fault,
    Noticed,
    RunEnded,
    RunStarted,
    Warned,
    WorkerLost,
    WorkerSpawned,
)
from outlast.fleet.lake import Lake
from outlast.telemetry.event_store import EventWriter

T = 1_716_000_000 * 10**9
S = 10**9


def started(t_ns: int, term: int) -> RunStarted:
    return RunStarted(
        t_ns=t_ns, run="gpt-7", term=term, world=4, spares=1, script="/home/ada/train_gpt.py",
        args=("--secret",),
    )  # fmt: skip


def spawned(t_ns: int, worker: str, seat: int, host: str) -> WorkerSpawned:
    return WorkerSpawned(t_ns=t_ns, worker=worker, seat=seat, pid=9, host=host)


def fault(worker: str, t_ns: int, detail: str = "killed by SIGKILL") -> Fault:
    return Fault(kind="killed", detail=detail, worker=worker, seat=1, n=12, signal=9, t_ns=t_ns)


FIRST: list[AnyEvent] = [
    started(T, 1), spawned(T + S, "w0", 0, "gpu01"), spawned(T + S, "w1", 1, "gpu02"),
    Noticed(
        t_ns=T + 5 * S, incident=1, generation=1, how="pidfd", fault=fault("w1", T + 4 * S)
    ),
    WorkerLost(t_ns=T + 6 * S, worker="w1", seat=1, fault=fault("w1", T + 4 * S)),
    Noticed(
        t_ns=T + 7 * S, incident=2, generation=2, how="drain",
        fault=Fault(kind="requested", detail="asked to end"),
    ),
]  # fmt: skip
SECOND: list[AnyEvent] = [
    started(T + 100 * S, 2), spawned(T + 101 * S, "w5", 0, "gpu01"),
    RunEnded(
        t_ns=T + 200 * S, outcome="gave_up", exit_code=3, n=5, step=5,
        cause=Fault(kind="agent_lost", detail="lease ran out", host="gpu01"),
    ),
]  # fmt: skip


def run_dir(path: Path, *events: AnyEvent) -> Path:
    writer = EventWriter(path / "events", "launcher")
    for event in events:
        writer.emit(event)
    writer.close()
    return path


def test_each_launcher_is_an_attempt_and_each_failure_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lake = run_dir(tmp_path / "run", *FIRST, *SECOND), tmp_path / "lake"
    assert main(["fleet", "ingest", str(lake), str(run), "--cluster", "rsc"]) == 0
    assert "9 rows: 2 jobs, 1 finding" in capsys.readouterr().out
    tables = Lake.open(lake).tables()
    first, second = tables.jobs.collect().rows(named=True)
    assert (first["state"], second["state"]) == ("FAILED", "NODE_FAIL")
    assert (first["hosts"], first["gpus"], first["name"]) == ("gpu[01-02]", 4, "train_gpt.py")
    assert (first["attempt"], second["attempt"], second["failed_node"]) == (0, 1, "gpu01")
    assert (first["t_ns"], second["t_ns"]) == (T + 7 * S, T + 200 * S)
    (finding,) = tables.findings.collect().rows(named=True)
    assert (finding["t_ns"], finding["node"]) == (T + 4 * S, "gpu02")
    assert (finding["code"], finding["device"], finding["cluster"]) == ("killed", "rank 1", "rsc")


def test_a_run_that_went_on_is_read_again(tmp_path: Path) -> None:
    run, lake = run_dir(tmp_path / "run", *FIRST), tmp_path / "lake"
    assert main(["fleet", "ingest", str(lake), str(run)]) == 0
    run_dir(run, *SECOND)
    assert main(["fleet", "ingest", str(lake), str(run)]) == 0
    jobs = Lake.open(lake).tables().jobs.collect()
    assert jobs["t_ns"].to_list() == [T + 7 * S, T + 200 * S]
    assert Lake.open(lake).tables().findings.collect().height == 1


def test_findings_of_node_checks_keep_symptom_and_severity(tmp_path: Path) -> None:
    def warned(severity: str, symptom: str = "gpu-driver") -> Warned:
        return Warned(
            t_ns=T + 2 * S, host="gpu01", check="gpu", symptom=symptom, severity=severity,
            code="XID 79", device="GPU 2", detail="fell off",
        )  # fmt: skip

    said = [warned("drain"), warned("healthy"), warned("very bad", "of another version")]
    run, lake = run_dir(tmp_path / "run", FIRST[0], *said, *FIRST[1:]), tmp_path / "lake"
    assert main(["fleet", "ingest", str(lake), str(run)]) == 0
    findings = Lake.open(lake).tables().findings.collect().rows(named=True)
    ours = [row for row in findings if row["check"] == "gpu"]
    assert {(row["severity"], row["symptom"]) for row in ours} == {
        ("drain", "gpu-driver"), ("healthy", "gpu-driver"), ("unknown", "other"),
    }  # fmt: skip
    assert {(row["node"], row["code"], row["device"]) for row in ours} == {
        ("gpu01", "XID 79", "GPU 2")
    }


def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake = tmp_path / "lake"
    assert main(["fleet", "ingest", str(lake), str(tmp_path)]) == 2
    assert "not of a run" in capsys.readouterr().err
    (tmp_path / "run" / "events").mkdir(parents=True)
    assert main(["fleet", "ingest", str(lake), str(tmp_path / "run")]) == 1
    assert "holds no events of a run" in capsys.readouterr().err
    assert not lake.exists()
