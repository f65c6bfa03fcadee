"""Compressed, rotated and differently encoded logs."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from outlast.errors import OutlastError
from outlast.fleet.formats.format_detection import LogOptions
from outlast.fleet.ingestion import IngestSummary, ingest
from outlast.fleet.lake import Lake

XID = (
    "2024-05-17T10:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen"
    " off the bus.\n"
)
FAULTS = (
    '[{"node_id": "a", "event_time": 1.0, "event_type": "fault_start", "fault_type": {}},'
    ' {"node_id": "a", "event_time": 2.0, "event_type": "fault_end", "fault_type": {}}]'
)
SMI = "timestamp, index, name, pci.bus_id, temperature.gpu\n"
HOT = "2024/05/17 10:00:00.000, 0, H100, 00000000:0A:00.0, {}\n"
ROW = "1|COMPLETED|2024-05-17T00:00:00|2024-05-17T10:00:00\n"
MAPPING = """rows = "events"
[columns]
time = "t"
node = "n"
[constants]
check = "nightly"
symptom = "other"
severity = "warn"
"""


def read(
    tmp_path: Path, name: str, text: str | bytes, asked: LogOptions | None = None
) -> IngestSummary:
    log = tmp_path / name
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ingest(tmp_path / "lake", [log], asked or LogOptions(node="n1"))


@pytest.mark.parametrize(
    ("text", "asked", "kind"),
    [
        (XID, LogOptions(), "findings"),
        (SMI + HOT.format("[Unknown Error]"), LogOptions(node="n1"), "findings"),
        ('{"Overall Health": "Healthy"}', LogOptions(node="n1", at="2024-05-17"), "findings"),
        (FAULTS, LogOptions(epoch="2024-03-30"), "outages"),
        ("t,n\n2024-05-17T10:00:00Z,n1\n", LogOptions(), "findings"),
        ('{"t": "2024-05-17T10:00:00Z", "n": "n1"}\n', LogOptions(), "findings"),
        ('[{"t": "2024-05-17T10:00:00Z", "n": "n1"}]', LogOptions(), "findings"),
    ],
)
def test_a_packed_log_is_read_as_it_was(
    tmp_path: Path, text: str, asked: LogOptions, kind: str
) -> None:
    """A rotated kernel log was once taken for so many ordinary lines, and its XIDs were gone."""
    (tmp_path / "log.toml").write_text(MAPPING)
    (plain,) = read(tmp_path, "log.csv", text, asked).read
    (packed,) = read(tmp_path, "log.csv.gz", gzip.compress(text.encode()), asked).read
    assert packed.source.records == plain.source.records and packed.source.records[kind] == 1
    assert packed.source.rows == plain.source.rows
    assert packed.source.rejects == plain.source.rejects
    assert Lake.open(tmp_path / "lake").tables().findings.collect().height <= 1, "the same ones"


def test_a_packed_log_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(100_000).hex()  # beyond what a log is known by
    cut = gzip.compress(f"{XID}{noise}\n".encode())[:-9]
    with pytest.raises(OutlastError, match="cannot be read to its end"):
        read(tmp_path, "log.gz", cut, LogOptions(format="kernel"))


def test_each_log_may_be_of_the_node_that_it_is_called_after(tmp_path: Path) -> None:
    """Logs of boards and diagnoses name no node, and a site has one for each."""
    entry = "1 | 05/17/24 | 10:00:00 UTC | Processor #0x01 | IERR | Asserted\n"
    logs = [tmp_path / "n1.txt", tmp_path / "n2.example.org.txt.gz", tmp_path / "n3"]
    logs[0].write_text(entry)
    logs[1].write_bytes(gzip.compress(entry.encode()))
    logs[2].write_text(entry)
    found = ingest(tmp_path / "lake", logs, LogOptions(node="{name}"))
    assert [one.source.format for one in found.read] == ["ipmi"] * 3
    nodes = Lake.open(tmp_path / "lake").tables().findings.collect()["node"]
    assert sorted(nodes) == ["n1", "n2.example.org", "n3"]
    (tmp_path / "n4").mkdir()
    again = tmp_path / "n4" / "sel.txt"
    again.write_text(entry)
    ingest(tmp_path / "other", [again], LogOptions(node="{folder}"))
    assert Lake.open(tmp_path / "other").tables().findings.collect()["node"].to_list() == ["n4"]


def test_an_answer_in_which_nothing_is_wrong_is_counted(tmp_path: Path) -> None:
    (found,) = read(tmp_path, "smi.csv", SMI + HOT.format(40)).read
    assert found.source.rows == 1
    assert dict(found.source.skipped) == {"answer in which nothing is wrong": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("       JobID    JobName  Partition      State\n------- ---\n", "is a table for display"),
        ("  JOBID PARTITION     NAME     USER ST\n", "is of squeue"),
        ("PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n", "is of sinfo"),
        (ROW.replace("1|", "1|a|b|", 1), "list its columns in their order"),
        ("JobID|Status|Start|End\n" + ROW, "has no column State"),
        (("JobID|State|Start|End\n" + ROW).encode("utf-16"), "is UTF-16"),
        (b"BZh91AY", "is compressed with bzip2"),
        ("apiVersion: v1\nitems: []\n", "is YAML: export it as JSON"),
        ("---\napiVersion: v1\n", "is YAML: export it as JSON"),
        ("", "is empty"),
    ],
)
def test_files_similar_to_accounting_are_refused_by_name(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    with pytest.raises(OutlastError, match=said):
        read(tmp_path, "dump.txt", text)
    assert not (tmp_path / "lake").exists()


def test_yaml_is_refused_by_name_with_a_mapping_too(tmp_path: Path) -> None:
    """It was read as CSV, whose only column was 'apiVersion: v1'."""
    (tmp_path / "pods.toml").write_text('rows = "jobs"\n[columns]\njob = "j"\nstate = "s"\n')
    with pytest.raises(OutlastError, match="is YAML"):
        read(tmp_path, "pods.yaml", "apiVersion: v1\nitems: []\n")


def test_columns_are_of_accounting_without_a_header(tmp_path: Path) -> None:
    asked = LogOptions(columns="JobID,State,Start,End")
    (found,) = read(tmp_path, "dump.txt", ROW, asked).read
    assert found.source.format == "sacct" and found.source.records == {"jobs": 1}
    with pytest.raises(OutlastError, match="header of its own"):
        read(tmp_path, "other.txt", "JobID|State|Start|End\n" + ROW, asked)


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "log")
    with pytest.raises(OutlastError, match="leads nowhere"):
        ingest(tmp_path / "lake", [tmp_path / "log"], LogOptions())
