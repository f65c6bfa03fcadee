"""Outage logs: reading, ingestion, and messages of the command."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from tests.fleet.whole_log import read_whole

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.fleet.formats import outage_logs
from outlast.fleet.lake import Lake
from outlast.fleet.record_tables import DAY_NS

EPOCH_NS = 19_812 * DAY_NS  # 2024-03-30
GPU = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "GPU Lost"}
NIC = {"Level": "Hardware Failure", "Class": "NIC", "Desc": "NIC PCI link Width low"}


def event(node: str, day: float, what: str, kind: dict[str, str] = GPU) -> dict[str, object]:
    return {
        "node_id": node, "event_time": day, "event_type": f"fault_{what}", "fault_type": kind,
    }  # fmt: skip


def written(path: Path, *events: object) -> Path:
    path.write_text(json.dumps(events))
    return path


def test_ends_belong_to_the_first_start_of_their_kind(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.json", event("a", 1, "start"), event("a", 2, "start", NIC),
        event("a", 3, "start"), event("a", 4, "end"), event("b", 5, "end"), event("a", 6, "end"),
        event("a", 5.5, "start", NIC), {"node_id": "c"}, event("", 7, "start"),
    )  # fmt: skip
    reading = outage_logs.read_fault_trace(
        path, outage_logs.TracedCluster(EPOCH_NS, "c", nodes=4, gpus_per_node=8)
    )
    part = read_whole(reading)
    outages = part.tables["outages"].sort("t_ns")
    days = [(t - EPOCH_NS) / DAY_NS for t in outages["t_ns"]]
    ends = [None if t is None else (t - EPOCH_NS) / DAY_NS for t in outages["until_ns"]]
    assert list(zip(days, ends, strict=True)) == [(1, 4), (2, None), (3, 6), (5.5, None)]
    assert outages["symptom"].cast(str).to_list() == ["gpu-unavailable", "pcie"] * 2
    assert part.tables["findings"].height == 4
    assert part.tables["nodes"]["node"].to_list()[:2] == ["a", "b"]
    assert part.tables["nodes"].height == 4
    totals = reading.totals
    assert totals.odd["faults without an end: their outages last"] == 2
    assert totals.odd["events that come after later ones"] == 1
    assert totals.rejects["an end without a start"] == 1
    assert [one.line for one in part.rejects if one.reason != "an end without a start"] == [8, 9]


@pytest.mark.parametrize("more", [["--nodes", "99999999999"], ["--gpus-per-node", "-1"]])
def test_numbers_that_no_cluster_has_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """One of the first filled the memory."""
    (tmp_path / "faults.json").write_text('[{"event_type": "fault_start"}]')
    words = ["fleet", "ingest", str(tmp_path / "lake"), str(tmp_path / "faults.json")]
    assert main([*words, "--epoch", "2024-03-30", *more]) == 2
    assert f"{more[0]} {more[1]}: from 1 to" in capsys.readouterr().err


def test_more_nodes_than_the_cluster_has_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", event("a", 1, "start"), event("b", 2, "start"))
    with pytest.raises(UsageError, match="alone has faults of 2"):
        list(outage_logs.read_fault_trace(path, outage_logs.TracedCluster(EPOCH_NS, nodes=1)))


@pytest.mark.parametrize(
    ("klass", "said", "symptom"),
    [
        ("GPU", "GPU DBE(Double Bit ECC) > Threshold", "gpu-memory"),
        ("GPU", "GPU PCI link width low", "pcie"),
        ("NIC", "NIC Lost", "ib-link"),
        ("CPU", "Machine Check Exception ( Uncorrectable )", "cpu"),
        ("File System", "FS Readonly", "filesystem"),
        ("Fan", "Speed Critical (Sensor)", "thermal"),
        ("Unknown Error", "Unknown Error", "other"),
    ],
)
def test_symptoms_follow_from_the_fault_text(klass: str, said: str, symptom: str) -> None:
    assert outage_logs.symptom_of(outage_logs.FaultKind("Hardware Failure", klass, said)) == symptom


def test_the_command_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.json", event("a", 1, "start"), event("a", 2, "end"))
    words = ["fleet", "ingest", str(tmp_path / "lake"), str(path), "--epoch", "2024-03-30"]
    assert main(words) == 0
    assert "2 rows: 1 finding, 1 outage, 1 node" in capsys.readouterr().out
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().out
    outage = Lake.open(tmp_path / "lake").tables().outages.collect().row(0, named=True)
    assert (outage["t_ns"], outage["until_ns"]) == (EPOCH_NS + DAY_NS, EPOCH_NS + 2 * DAY_NS)
    assert main([*words[:4], "--json"]) == 2
    assert "--epoch 2024-03-30" in capsys.readouterr().err


def test_the_real_trace(traces: Path, tmp_path: Path) -> None:
    path = traces / "infinitehbd" / "fault_trace.json"
    words = ["--epoch", "2024-03-30", "--nodes", "400", "--gpus-per-node", "8"]
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(path), *words]) == 0
    tables = Lake.open(tmp_path / "lake").tables()
    outages = tables.outages.collect()
    assert (outages.height, outages["node"].n_unique()) == (584, 231)
    assert outages["until_ns"].null_count() == 0
    assert tables.nodes.collect()["gpus"].sum() == 3200
    assert 348 < (tables.until_ns - tables.since_ns) / DAY_NS < 349
    per_node = outages.group_by("node").len()["len"].append(pl.Series([0] * 169, dtype=pl.UInt32))
    assert round(per_node.var() / per_node.mean(), 2) == 2.58  # type: ignore[operator]
