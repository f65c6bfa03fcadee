"""`outlast fleet ingest`: from logs of any kind to a lake."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from outlast.cli.main import main
from outlast.fleet import ingestion as ingesting
from outlast.fleet.formats.format_detection import LogOptions
from outlast.fleet.lake import Lake
from outlast.fleet.lake_writer import READING

HEADER = "JobID|JobName|User|State|Start|End|NNodes|NodeList|AllocTRES|Submit\n"
SEL = "   1 | 05/17/2024 | 10:00:00 | Processor #0x01 | IERR | Asserted\n"
XID = "2024-05-17T10:00:00,123456+00:00 NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off\n"


def row(job: str, state: str, end: str, start: str = "2024-05-17T00:00:00") -> str:
    return f"{job}|train|ada|{state}|{start}|{end}|1|n1|gres/gpu=8|2024-05-16T23:00:00\n"


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def ingest(*words: str | Path) -> int:
    return main(["fleet", "ingest", *map(str, words)])


def summary(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    assert ingest(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


def test_day_after_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = tmp_path / "lake"
    monday = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00") + row("2", "RUNNING", "Unknown")
    tuesday = HEADER + row("2", "NODE_FAIL", "2024-05-18T09:00:00") + row(
        "2", "COMPLETED", "2024-05-18T20:00:00", "2024-05-18T10:00:00"
    ) + row("1", "COMPLETED", "2024-05-17T10:00:00")  # fmt: skip
    first = summary(capsys, lake, written(tmp_path / "monday", monday), "--cluster", "rsc")
    assert first["rows"] == {"jobs": 2}
    second = summary(capsys, lake, written(tmp_path / "tuesday", tuesday), "--cluster", "rsc")
    assert second["added"] == {"jobs": [3, 1, 1]}
    assert second["rows"] == {"jobs": 3}
    jobs = Lake.open(lake).tables().jobs.sort("t_ns").collect()
    assert jobs["state"].cast(str).to_list() == ["COMPLETED", "NODE_FAIL", "COMPLETED"]
    assert jobs["attempt"].to_list() == [0, 0, 1]
    before = files(lake)
    third = summary(capsys, lake, tmp_path / "monday", tmp_path / "tuesday", "--cluster", "rsc")
    assert [one["before"] for one in third["read"]] == [True, True]
    assert files(lake) == before


def test_a_log_read_again_in_another_zone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def log(hours: int) -> str:
        rows = [
            f"{job}|train|ada|COMPLETED|2024-05-17T{3 + job + hours:02d}:00:0{job}"
            f"|2024-05-17T{5 + job + hours:02d}:10:00|1|n{job}|gres/gpu=8"
            f"|2024-05-17T{2 + hours:02d}:00:00\n"
            for job in range(5)
        ]
        return HEADER + "".join(rows)

    utc, paris = written(tmp_path / "utc", log(0)), written(tmp_path / "paris", log(2))
    right = tmp_path / "right"
    assert summary(capsys, right, utc)["odd"] == []
    assert summary(capsys, right, paris, "--zone", "Europe/Paris")["odd"] == []
    assert Lake.open(right).tables().jobs.collect().height == 5
    summary(capsys, tmp_path / "wrong", utc)
    notes = summary(capsys, tmp_path / "wrong", paris)["odd"]
    assert any("attempts of 5 jobs are in the lake twice, 2 h apart" in note for note in notes)


def test_requeued_jobs_are_not_taken_for_another_zone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(
            str(job),
            "NODE_FAIL",
            f"2024-05-17T{hour + 1:02d}:00:00",
            f"2024-05-17T{hour:02d}:00:00",
        )
        for job in range(9)
        for hour in (1, 4, 8)
    ]
    found = summary(capsys, tmp_path / "lake", written(tmp_path / "log", HEADER + "".join(rows)))
    assert not [note for note in found["odd"] if "twice" in note]


def test_an_event_log_with_days_before_months_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "sel", SEL.replace("05/17", "04/11") + SEL.replace("05/17", "24/11"))
    assert ingest(tmp_path / "lake", log, "--node", "n1") == 1
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "the date 24/11/2024, which is day/month" in said and "LC_ALL=C ipmitool" in said
    assert not (tmp_path / "lake").exists()


def test_formats_are_recognised_by_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xml = (
        '<?xml version="1.0" ?>\n<nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log>'
    )
    logs = {
        "sacct": HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00"),
        "sacct-json": json.dumps({"meta": {}, "jobs": [], "errors": []}),
        "kernel": XID,
        "ipmi": SEL,
        "dcgm": '{"DCGM Diagnostic": {"test_categories": []}}',
        "nvidia-smi": xml,
    }  # fmt: skip
    paths = [written(tmp_path / f"log{place}", text) for place, text in enumerate(logs.values())]
    found = summary(capsys, tmp_path / "lake", *paths, "--node", "n1", "--at", "2024-05-18")
    assert [one["source"]["format"] for one in found["read"]] == list(logs)
    tables = Lake.open(tmp_path / "lake").tables()
    codes = tables.findings.filter(check="kernel.xid").collect()
    assert codes["code"].to_list() == ["XID 79"]
    assert codes["node"].to_list() == ["n1"]


def test_a_packed_log_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00")
    (tmp_path / "sacct.gz").write_bytes(gzip.compress(text.encode()))
    assert summary(capsys, tmp_path / "lake", tmp_path / "sacct.gz")["rows"] == {"jobs": 1}


def test_bad_rows_are_kept_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00") + row("2", "MELTED", "2024-05-18")
    log, lake = written(tmp_path / "log", text), tmp_path / "lake"
    assert ingest(lake, log) == 0
    said = capsys.readouterr().out
    assert "1 rejected:" in said and "line 3: 2|train|ada|MELTED" in said
    (rejects,) = lake.glob("rejects/*.jsonl")
    (one,) = map(json.loads, rejects.read_text().splitlines())
    assert (one["line"], one["source"]) == (3, str(log))
    assert "MELTED" in one["text"]
    source = summary(capsys, lake, log)["read"][0]["source"]
    assert source["rows"] == 2 == sum(source["records"].values()) + sum(source["rejects"].values())


@pytest.mark.parametrize(
    ("text", "words", "code", "said"),
    [
        ("hello\n", (), 1, "has an unknown format: it begins with 'hello"),
        ("", (), 1, "is empty"),
        (HEADER + "x|y\n", (), 1, "none of its 1 rows could be read"),
        (HEADER, ("--as", "kernel", "--mapping", "m.toml"), 2, "--mapping goes with"),
        (HEADER, ("--nodes", "4"), 2, "--nodes goes with faults, not with sacct"),
        (HEADER, ("--zone", "Europe/Pariss"), 2, "did you mean Europe/Paris?"),
        (HEADER, ("--as", "events"), 2, "unknown columns"),
        (XID, ("--at", "noon"), 2, "--at noon: not a date"),
        (XID, (), 1, "does not name its node"),
    ],
)  # fmt: skip
def test_an_unreadable_log_is_an_error_and_leaves_the_lake_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: tuple[str, ...],
    code: int, said: str,
) -> None:  # fmt: skip
    lake = tmp_path / "lake"
    good = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00")
    assert ingest(lake, written(tmp_path / "good", good)) == 0
    before = files(lake)
    also = written(tmp_path / "also", good.replace("ada", "bob"))
    alone = "--nodes" in words or "--as" in words
    logs = [written(tmp_path / "log", text)] if alone else [also, written(tmp_path / "log", text)]
    assert ingest(lake, *logs, *words) == code
    assert said in capsys.readouterr().err
    assert files(lake) == before


def test_a_log_that_is_not_there_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ingest(tmp_path / "lake", tmp_path / "missing") == 2
    assert "does not exist" in capsys.readouterr().err
    assert ingest(tmp_path / "lake") == 2
    assert "no logs were given" in capsys.readouterr().err
    assert not (tmp_path / "lake").exists()


def test_a_mapping_beside_a_log_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "nodes.csv", "name,since\nn1,2024-05-17\n")
    mapping = 'rows = "nodes"\n[columns]\nnode = "name"\ntime = "since"\n'
    written(tmp_path / "nodes.toml", mapping)
    found = summary(capsys, tmp_path / "lake", log, "--cluster", "rsc")
    assert found["rows"] == {"nodes": 1}
    assert "--zone" in found["read"][0]["source"]["notes"][0]


def test_records_that_are_still_to_come_are_odd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "log", HEADER + row("1", "COMPLETED", "2096-05-17T10:00:00"))
    odd = summary(capsys, tmp_path / "lake", log)["read"][0]["source"]["odd"]
    assert any("in the future" in what for what in odd)


def test_a_log_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path / "log", HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00"))

    size = log.stat().st_size

    def grow(_source: str, _rows: int) -> None:
        if log.stat().st_size == size:
            with log.open("a") as file:
                file.write(row("2", "COMPLETED", "2024-05-17T10:00:00"))

    with pytest.raises(ingesting.SourceError, match="changed while it was read"):
        ingesting.ingest(tmp_path / "lake", [log], LogOptions(), on_progress=grow)
    assert not (tmp_path / "lake").exists()


def started(lake: Path, log: Path) -> subprocess.Popen[str]:
    """A reading that is in its middle: the log is long enough."""
    log.write_text("node,time\n" + "n1,2024-05-17\n" * 600_000)
    mapping = 'rows = "nodes"\n[columns]\nnode = "node"\ntime = "time"\n'
    written(log.with_suffix(".toml"), mapping)
    words = [sys.executable, "-m", "outlast", "fleet", "ingest", lake, log]
    reading = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (lake / READING).exists() and time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            reading.wait(0.02)
            break
    return reading


@pytest.mark.process
def test_an_interrupted_ingestion_leaves_the_lake_intact(tmp_path: Path) -> None:
    """By Ctrl-C; tests/fleet/test_killed_lake_writer.py kills it."""
    lake = tmp_path / "lake"
    good = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00")
    assert ingest(lake, written(tmp_path / "good", good)) == 0
    before = files(lake)
    reading = started(lake, tmp_path / "nodes.csv")
    try:
        reading.send_signal(signal.SIGINT)
        _, said = reading.communicate(timeout=60)
    finally:
        reading.kill()
    assert reading.returncode == 4 and "is intact" in said
    assert files(lake) == before
    assert Lake.open(lake).tables().jobs.collect().height == 1
    assert ingest(lake, tmp_path / "good") == 0
    assert files(lake) == before


@pytest.mark.process
def test_a_full_disk_is_an_error_and_leaves_the_lake_unchanged(
    tmp_path: Path,
) -> None:
    """Neither records nor rejects."""
    lake, logs = tmp_path / "lake", [tmp_path / "records", tmp_path / "rejects"]
    good = HEADER + row("1", "COMPLETED", "2024-05-17T10:00:00")
    assert ingest(lake, written(tmp_path / "good", good)) == 0
    before = files(lake)
    for log, end in zip(logs, ("2024-05-18T00:00:00", "no time"), strict=True):
        rows = "".join(row(str(n), "FAILED", end) for n in range(2_000))
        log.write_text(HEADER + row("0", "FAILED", "2024-05-18T00:00:00") + rows)
    limited = (
        "import resource, sys; from outlast.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000));"
        "sys.exit([main(['fleet', 'ingest', sys.argv[1], log]) for log in sys.argv[2:]] != [1, 1])"
    )
    words = [sys.executable, "-c", limited, lake, *logs]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr.count("cannot be written") == 2, done.stderr
    assert files(lake) == before


def test_a_synthetic_cluster_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synth, lake = tmp_path / "synth", tmp_path / "lake"
    words = ["synth", synth, "--shape", "rsc1", "--days", "2", "--nodes", "32", "--seed", "3"]
    assert main(["fleet", *map(str, words)]) == 0
    capsys.readouterr()
    logs = [synth / "sacct.txt", synth / "health.jsonl", *synth.glob("*.csv")]
    assert summary(capsys, lake, *logs)["odd"] == []
    from outlast.fleet.synth.synthetic_cluster import make_cluster

    expected, _ = make_cluster("rsc1", 2, nodes=32, seed=3)
    found = Lake.open(lake).tables()
    for name in ("nodes", "repairs", "outages", "checks"):
        ours, theirs = getattr(found, name).collect(), getattr(expected, name).collect()
        assert ours.height == theirs.height
    jobs, truth = found.jobs.collect(), expected.jobs.collect()
    assert jobs.height == truth.height
    assert jobs["gpus"].sum() == truth["gpus"].sum()
    states = pl.col("state").cast(pl.String)
    assert (
        jobs.group_by(states).len().sort("state").equals(truth.group_by(states).len().sort("state"))
    )


def test_real_logs(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake, sacct, health = tmp_path / "lake", traces / "sacct_fixtures", traces / "health_fixtures"
    accounting = [
        sacct / "sample-sacct-output-midnight-edge-case.txt", sacct / "sarc_mila_1714003200.json",
        sacct / "clockwork_sacct_1_v0.0.37.json",
    ]  # fmt: skip
    found = summary(capsys, lake, *accounting, "--cluster", "real")
    assert found["rows"]["jobs"] == 306 + 8 + 2
    assert ingest(lake, sacct / "sample-sinfo-output.txt") == 1
    assert "has an unknown format" in capsys.readouterr().err
    machines = [
        health / "dmesg-with-xid-119.log", health / "DCGMIDiag_r3_results.json",
        health / "DCGMIHealthCheckResults.json",
    ]  # fmt: skip
    found = summary(capsys, lake, *machines, "--node", "n1", "--cluster", "real")
    assert [one["source"]["format"] for one in found["read"]] == ["kernel", "dcgm", "dcgm"]
    assert found["rows"]["findings"] == 8
