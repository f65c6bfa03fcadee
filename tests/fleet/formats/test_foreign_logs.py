"""Logs of other sites' tools: correct figures, or refusal by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import SourceError
from outlast.fleet.analysis.exposure import attempts
from outlast.fleet.formats.format_detection import LogOptions
from outlast.fleet.formats.hardware_logs import NO_CLOCK, NO_SHAPE
from outlast.fleet.formats.log_reading import NO_UTF8, TWICE
from outlast.fleet.formats.log_rows import UNCLOSED
from outlast.fleet.formats.mapped_logs import NEVER_BEGAN, NO_START, OTHER_SPAN, SEVERAL_NODES
from outlast.fleet.host_lists import to_slurm_list
from outlast.fleet.ingestion import IngestSummary, ingest
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window
from outlast.node_logs.log_envelopes import NO_ENTRY, NO_WRITER
from outlast.node_logs.log_readings import LEFT_OUT

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=123, GPU has fallen off the bus."
JOBS = """rows = "jobs"
[columns]
job = "job_id"
state = "state"
start = "start"
end = "end"
gpus = "gpus"
hosts = "hosts"
user = "user"
"""
JOB = {
    "job_id": 1, "state": "COMPLETED", "start": "2024-05-17T10:00:00Z",
    "end": "2024-05-17T11:00:00Z", "gpus": 16, "hosts": "n1", "user": "a",
}  # fmt: skip


def read(folder: Path, content: str | bytes, name: str = "some.log", **asked: Any) -> IngestSummary:
    log = folder / name
    log.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ingest(folder / "lake", [log], LogOptions(**asked))


def findings(folder: Path) -> list[tuple[str, int]]:
    table = Lake.open(folder / "lake").tables().findings.sort("t_ns").collect()
    return list(zip(table["node"], (table["t_ns"] // 10**9).to_list(), strict=True))


def mapping(folder: Path, text: str = JOBS) -> Path:
    path = folder / "jobs.toml"
    path.write_text(text)
    return path


def test_syslog_of_rfc_5424(tmp_path: Path) -> None:
    log = (
        f"<4>1 2024-05-17T10:00:00.5+02:00 n1 kernel - - - [ 12.3] {XID}\n"
        f'<4>1 2024-05-17T08:00:01Z n2 kernel - - [o@1 a="x\\]y"][p@2] {XID}\n'
        f"<30>1 2024-05-17T08:00:02Z n3 python 12 - - {XID}\n"
        "<30>1 2024-05-17T08:00:02Z n3 x - - -\n"
    )
    found = read(tmp_path, log)
    assert findings(tmp_path) == [("n1", 1715932800), ("n2", 1715932801)]
    assert found.read[0].source.skipped == {"ordinary lines": 2}


def test_json_that_is_no_journal_is_refused_and_not_called_ordinary(tmp_path: Path) -> None:
    loki = {"labels": {"host": "n1"}, "line": XID, "timestamp": "2024-05-17T10:00:00Z"}
    with pytest.raises(SourceError, match=NO_ENTRY):
        read(tmp_path, json.dumps(loki) + "\n", format="kernel")


def test_a_journal_without_its_writers_is_refused(tmp_path: Path) -> None:
    entry = {"__REALTIME_TIMESTAMP": "1715932800000000", "_BOOT_ID": "b", "MESSAGE": XID}
    other = entry | {"MESSAGE": "all is well"}
    found = read(tmp_path, f"{json.dumps(other)}\n{json.dumps(entry)}\n", node="n1")
    assert found.read[0].source.rejects == {NO_WRITER: 1}
    assert found.read[0].source.skipped == {"ordinary lines": 1}


def test_programs_of_a_monotonic_journal_are_not_the_kernel(tmp_path: Path) -> None:
    log = (
        f"[   12.5] n1 kernel: {XID}\n[   13.5] n1 python[12]: {XID}\n"
        "[   14.5] nvidia 0000:3b:00.0: enabling device\n"
    )
    found = read(tmp_path, log, boot="2024-05-17T08:00:00")
    assert findings(tmp_path) == [("n1", 1715932812)]
    assert found.read[0].source.skipped == {"ordinary lines": 2}


def test_hours_that_clocks_show_twice_or_leave_out(tmp_path: Path) -> None:
    named = (
        f"Sun 2024-10-27 02:30:00 CEST n1 kernel: {XID}\n"
        f"Sun 2024-10-27 02:30:00 CET n1 kernel: {XID}\n"
    )
    read(tmp_path, named, zone="Europe/Paris")
    assert findings(tmp_path) == [("n1", 1729989000), ("n1", 1729992600)]
    other = tmp_path / "other"
    other.mkdir()
    bare = (
        f"Oct 27 02:30:00 n1 kernel: {XID}\nMar 31 02:30:00 n1 kernel: {XID}\n"
        f"[Sun Mar 31 02:30:00 2024] {XID}\n"
    )
    found = read(other, bare, zone="Europe/Paris", at="2024-11-01").read[0].source
    assert (found.odd, found.rejects) == ({TWICE: 1}, {LEFT_OUT: 2})


def test_an_event_log_in_the_zone_that_it_names(tmp_path: Path) -> None:
    line = " {} | 05/17/2024 | 10:00:00{} | Memory #0x53 | Uncorrectable ECC | Asserted\n"
    log = line.format("1", " CEST") + line.format("2", "") + line.format("3", " EST")
    found = read(tmp_path, log, node="n1", zone="Europe/Paris").read[0].source
    assert findings(tmp_path) == [("n1", 1715932800)] * len(findings(tmp_path))
    assert found.rejects == {"a time in the zone EST, and the zone given is CEST": 1}
    unsaid = tmp_path / "unsaid"
    unsaid.mkdir()
    assert "--zone" in read(unsaid, line.format("1", ""), node="n1").read[0].source.notes[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1/0*8+n2/0*8", "n1,n2"),
        ("n1/0-7+n2/0,2-7", "n1,n2"),
        ("(n1:ncpus=8:mem=4gb)+(n2:ncpus=8)", "n1,n2"),
        ("8*n1:8*n2", "n1,n2"),
        ("n1:n1:n2", "n1,n2"),
        ("n1:8,n2:8", "n1,n2"),
        ("n1,n1,n2", "n1,n2"),
        ("n[1-2,4]", "n[1-2,4]"),
        ("projects/p/zones/z/instances/n1", "projects/p/zones/z/instances/n1"),
        ("arn:aws:ec2:us-east-1:1:instance/i-1", "arn:aws:ec2:us-east-1:1:instance/i-1"),
        ("['n1','n2']", None),
        ("n1+n2*", None),
        ("", ""),
    ],
)  # fmt: skip
def test_host_lists_of_other_schedulers(text: str, expected: str | None) -> None:
    assert to_slurm_list(text) == expected


def test_hosts_of_pbs_count_as_nodes(tmp_path: Path) -> None:
    rows = [JOB | {"job_id": i, "hosts": one} for i, one in enumerate(["n1/0*8+n2/0*8", "n1*+n2"])]
    log = "\n".join(map(json.dumps, rows))
    found = read(tmp_path, log, mapping=mapping(tmp_path))
    job = Lake.open(tmp_path / "lake").tables().jobs.collect().row(0, named=True)
    assert (job["nodes"], job["hosts"], job["gpus"]) == (2, "n1,n2", 16)
    assert found.read[0].source.rejects == {"no host list: hosts": 1}


def test_a_mapping_beside_a_list_of_jobs_goes_before_a_guess(tmp_path: Path) -> None:
    mapping(tmp_path, f'items = "jobs"\n{JOBS}')
    found = read(tmp_path, json.dumps({"jobs": [JOB]}), "jobs.json")
    assert found.read[0].source.format == "jobs"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SourceError, match="--mapping"):
        read(other, json.dumps([JOB]), "jobs.json")


def test_bytes_of_another_encoding_are_counted(tmp_path: Path) -> None:
    header, row = ",".join(JOB), ",".join(map(str, (JOB | {"user": "José"}).values()))
    log = f"{header}\n{row}\n".encode("latin-1")
    assert read(tmp_path, log, mapping=mapping(tmp_path)).read[0].source.odd == {NO_UTF8: 1}


def test_a_column_that_a_header_names_twice_is_refused(tmp_path: Path) -> None:
    log = f"{','.join(JOB)},gpus\n{','.join(map(str, JOB.values()))},4\n"
    with pytest.raises(SourceError, match="2 columns 'gpus'"):
        read(tmp_path, log, mapping=mapping(tmp_path))


def test_a_job_that_ends_long_after_a_window_ran_in_it(tmp_path: Path) -> None:
    """A run of 50 days, asked for its first nine: it held 256 nodes in all of them."""
    rows = [
        f"{i}|{state}|2024-05-0{day}T00:00:00|{end}T00:00:00|{nodes}|gres/gpu={8 * nodes}\n"
        for i, state, day, end, nodes in (
            (1, "COMPLETED", 1, "2024-06-20", 256), (2, "COMPLETED", 1, "2024-05-02", 1),
            (3, "SUSPENDED", 3, "2024-05-05", 1), (4, "COMPLETED", 3, "2024-06-25", 1),
        )
    ]  # fmt: skip
    read(tmp_path, "JobID|State|Start|End|NNodes|AllocTRES\n" + "".join(rows))
    found = attempts(load_window(Lake.open(tmp_path / "lake"), "2024-05-01", "2024-05-10"))
    held = found.sort("job").select("node_days", "ended").collect().rows()
    assert held == [(256 * 9.0, False), (1.0, True), (2.0, False), (7.0, False)]


def test_a_quote_in_a_reason_hides_no_outage(tmp_path: Path) -> None:
    """sacctmgr quotes nothing: a quote that begins a reason went on to the next quote."""
    log = "NodeName|TimeStart|TimeEnd|Reason|User\n" + "".join(
        f"n{i}|2024-05-17T10:00:00|Unknown|{reason}|root\n"
        for i, reason in enumerate(('"bad gpu', 'ok"', '"', "plain"))
    )
    read(tmp_path, log)
    outages = Lake.open(tmp_path / "lake").tables().outages.sort("node").collect()
    assert outages["node"].to_list() == ["n0", "n1", "n2", "n3"]
    assert outages["detail"].to_list() == ['"bad gpu', 'ok"', '"', "plain"]


def test_rows_behind_an_open_quote_are_rejects_each(tmp_path: Path) -> None:
    text = 'rows = "outages"\n[columns]\ntime = "t"\nnode = "n"\n'
    log = 't,n,why\n1715940000,n1,"bad\n1715940000,n2,ok"\n1715940000,n3,"two\nlines"\n'
    found = read(tmp_path, log, mapping=mapping(tmp_path, text)).read[0]
    assert (found.source.rejects, found.source.rows) == ({UNCLOSED: 2}, 3)
    assert [one.line for one in found.examples] == [2, 3]
    other = tmp_path / "other"
    other.mkdir()
    literal = mapping(other, f"quotes = false\n{text}")
    rest = read(other, log[: log.index("1715940000,n3")], mapping=literal)
    assert rest.read[0].source.records == {"outages": 2}


def test_a_row_of_several_nodes_is_refused(tmp_path: Path) -> None:
    text = 'rows = "outages"\n[columns]\ntime = "t"\nnode = "n"\n'
    rows = [{"t": 1715940000, "n": node} for node in ("n[1-2]", ["n1", "n2"], "n3")]
    log = "\n".join(map(json.dumps, rows))
    found = read(tmp_path, log, mapping=mapping(tmp_path, text)).read[0].source
    assert (found.rejects, found.records) == ({SEVERAL_NODES: 2}, {"outages": 1})


def test_starts_and_durations_that_do_not_fit(tmp_path: Path) -> None:
    none = {"start": None, "end": None, "duration": None}
    rows = [
        JOB | none | {"end": "2024-05-17T11:00:00Z", "duration": 3600},
        JOB | {"job_id": 2, "hosts": "n2", "duration": 60},
        JOB | none | {"job_id": 3, "state": "RUNNING"},
        JOB | none | {"job_id": 4, "end": "2024-05-17T11:00:00Z"},
    ]
    log = "\n".join(map(json.dumps, rows))
    said = mapping(tmp_path, f'{JOBS}duration = "duration"\n')
    found = read(tmp_path, log, mapping=said).read[0].source
    assert found.rejects == {NO_START: 1}
    assert found.odd == {OTHER_SPAN: 1, NEVER_BEGAN: 1}
    jobs = Lake.open(tmp_path / "lake").tables().jobs.sort("job").collect()
    assert ((jobs["t_ns"] - jobs["start_ns"]) // 10**9).to_list() == [3600, 3600, None]


def test_a_second_header_with_other_columns_is_refused(tmp_path: Path) -> None:
    """Two exports in one file: the second one's Submit was read as the start."""
    first = "JobID|State|Start|End\n1|COMPLETED|2024-05-17T10:00:00|2024-05-17T11:00:00\n"
    other = "JobID|State|Submit|Start\n2|COMPLETED|2024-05-17T08:00:00|2024-05-17T10:00:00\n"
    with pytest.raises(SourceError, match=r"second header in line 3"):
        read(tmp_path, first + other)
    again = first + first.replace("\n1|", "\n2|")
    assert read(tmp_path, again).read[0].source.skipped == {"header again": 1}


def test_utf_16_without_its_mark_is_refused(tmp_path: Path) -> None:
    log = f"2024-05-17T10:00:00Z n1 kernel: {XID}\n".encode("utf-16-le")
    with pytest.raises(SourceError, match="UTF-16"):
        read(tmp_path, log, format="kernel")


def test_findings_of_a_clock_that_was_not_set_are_rejects(tmp_path: Path) -> None:
    lines = (f"{day}T00:01:00Z n1 kernel: {XID}\n" for day in ("1970-01-01", "2024-01-01"))
    log = read(tmp_path, "".join(lines)).read[0]
    assert log.source.rejects == {NO_CLOCK: 1}
    assert [(one.line, one.text[:10]) for one in log.examples] == [(1, "1970-01-01")]
    assert len(findings(tmp_path)) == 1


def test_a_finding_without_a_node_is_a_reject_with_its_line(tmp_path: Path) -> None:
    lines = [f"2024-05-17T10:00:00Z {host}{XID}" for host in ("n1 kernel: ", "")]
    log = read(tmp_path, "\n".join(["ordinary", *lines]), format="kernel").read[0]
    assert [(one.line, one.text) for one in log.examples] == [(3, lines[1])]


def test_node_is_refused_for_a_log_of_several_hosts(tmp_path: Path) -> None:
    """A collector's log with --node: the findings of all hosts were one node's."""
    lines = [f"2024-05-17T10:00:0{k}Z {host} kernel: {XID}" for k, host in enumerate(["g1", "g2"])]
    with pytest.raises(SourceError, match=r"several hosts \(g1, g2\), and --node n1 .* unchanged"):
        read(tmp_path, "\n".join(lines), node="n1")
    alone = [lines[0], lines[0].replace("g1", "g1.example.org").replace("10:", "11:")]
    read(tmp_path, "\n".join(alone), node="n1")
    assert [node for node, _ in findings(tmp_path)] == ["n1", "n1"]


def test_a_log_wrongly_given_as_a_kernel_log_is_noted(tmp_path: Path) -> None:
    fabric = "-I- Discovering ... 10 nodes\n-W- lid=0x1 port=1 symbol_error_counter=12\n"
    assert read(tmp_path, fabric, format="kernel", node="n1").read[0].source.notes == (NO_SHAPE,)
