"""Logs of any columns, read through a mapping file."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.whole_log import read_whole

from outlast.errors import SourceError, UsageError
from outlast.fleet.formats.column_mapping import load_mapping
from outlast.fleet.formats.log_reading import VANISHED, ReadTotals, RecordBatch
from outlast.fleet.formats.mapped_logs import BACKWARDS, NO_DURATION, MappedLogContext, read_mapped
from outlast.fleet.formats.timestamps import parse_timestamps
from outlast.fleet.host_lists import OTHER_NODES

TAKEN_NS = 1_716_000_000 * 10**9
EVENTS = """
rows = "events"
[columns]
time = "when"
node = "host"
symptom = "what"
detail = "text"
[constants]
check = "nightly"
severity = "warn"
[values.symptom]
ECC = "gpu-memory"
"/nv-?link.*/" = "nvlink"
"""
JOBS = """
rows = "jobs"
[columns]
job = "metadata.name"
user = "spec.user"
state = "status.phase"
start = "status.start"
end = "status.end"
duration = "lasted"
gpus = "spec.gpus"
hosts = "spec.nodes"
[times]
duration = "min"
[values.state]
Preempted = "PREEMPTED"
"""


def mapping(path: Path, text: str) -> Path:
    (path / "mapping.toml").write_text(text)
    return path / "mapping.toml"


def reading(
    path: Path, said: str, text: str, *, zone: str = "UTC", cluster: str = ""
) -> tuple[RecordBatch, ReadTotals]:
    (path / "log").write_text(text)
    found = read_mapped(
        path / "log", load_mapping(mapping(path, said)), MappedLogContext(zone, cluster, TAKEN_NS)
    )
    return read_whole(found), found.totals


def seconds(column: pl.Series) -> list[int | None]:
    return [None if t is None else t // 10**9 for t in column]


def test_findings_of_csv(tmp_path: Path) -> None:
    text = (
        '\ufeffwhen,host,what,text\r\n2024-05-17 10:00:00,n1,ECC,"two, of\nthem"\r\n'
        "1715940000,n2,NVLink down,\r\n2024-05-17T12:00:00+02:00,n3,thermal,\n"
    )
    part, totals = reading(tmp_path, EVENTS, text, cluster="rsc")
    found = part.tables["findings"]
    assert seconds(found["t_ns"]) == [1715940000] * 3
    assert found["symptom"].cast(str).to_list() == ["gpu-memory", "nvlink", "thermal"]
    assert found.row(0, named=True) == {
        "t_ns": 1715940000 * 10**9, "cluster": "rsc", "node": "n1", "check": "nightly",
        "symptom": "gpu-memory", "severity": "warn", "code": "", "device": "",
        "detail": "two, of\nthem",
    }  # fmt: skip
    assert (totals.rows, totals.records["findings"]) == (3, 3)


def test_bad_rows_are_rejected_each_with_its_reason(tmp_path: Path) -> None:
    text = (
        "when,host,what,text\n2024-05-17,n1,ECC,\nyesterday,n1,ECC,\n1024-05-17,n1,ECC,\n"
        "2024-05-17,,ECC,\n2024-05-17,n1,gremlins,\n2024-05-17,n1\n,n1,ECC,\n"
        "2024-05-17,n1,ECC,a,b\n\n"
    )
    part, totals = reading(tmp_path, EVENTS, text)
    assert part.tables["findings"].height == 1
    assert {(one.line, one.reason) for one in part.rejects} == {
        (3, "no time between 2000 and 2100: time"),
        (4, "no time between 2000 and 2100: time"),
        (5, "no node"),
        (6, "no symptom that is known: [values.symptom] can translate it"),
        (7, "fewer fields than the header"),
        (8, "no time"),
        (9, "more fields than the header"),
    }
    assert {one.text for one in part.rejects if one.line == 5} == {"2024-05-17,,ECC,"}
    assert totals.rows == 8


def test_another_delimiter_is_detected_and_named(tmp_path: Path) -> None:
    text = "when;host;what;text\n2024-05-17;n1;ECC;\n"
    with pytest.raises(SourceError, match='say delimiter = ";" in the mapping'):
        reading(tmp_path, EVENTS, text)
    part, _ = reading(tmp_path, 'delimiter = ";"\n' + EVENTS, text)
    assert part.tables["findings"]["node"].to_list() == ["n1"]


def test_jobs_of_json(tmp_path: Path) -> None:
    def job(name: str, phase: str, **more: object) -> dict[str, object]:
        times = {key: more.pop(key) for key in ("start", "end") if key in more}
        spec = {"user": "ada", "gpus": 8, "nodes": ["n1", "n2"]}
        return {
            "metadata": {"name": name}, "spec": spec, "status": {"phase": phase, **times}, **more,
        }  # fmt: skip

    rows = [
        job("a", "Succeeded", start=1715940000, end="2024-05-17T11:00:00Z"),
        job("b", "preempted", start=1715940000.5, lasted=30),
        job("c", "Running", start="2024-05-17T10:00:00Z"),
        job("d", "Failed", start="2024-05-17T10:00:00Z", end="2024-05-17T09:00:00Z"),
        job("e", "Failed"),
        job("f", "Lost", end=1715940000),
    ]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows)) + "\n[1]\n"):
        part, totals = reading(tmp_path, JOBS, text)
        jobs = part.tables["jobs"]
        states = ["COMPLETED", "PREEMPTED", "RUNNING", "FAILED"]
        assert jobs["state"].cast(str).to_list() == states
        ended = [1715943600, 1715941800, TAKEN_NS // 10**9, 1715936400]
        assert seconds(jobs["t_ns"]) == ended
        assert jobs["t_ns"][1] % 10**9 == 5 * 10**8
        assert jobs["hosts"].to_list() == ["n1,n2"] * 4 and jobs["nodes"].to_list() == [2] * 4
        assert totals.odd[BACKWARDS] == 1
        reasons = {one.reason for one in part.rejects}
        assert {"no end, nor a start and a duration"} < reasons
        assert any("[values.state]" in one for one in reasons)


def test_every_kind_of_record_can_be_mapped(tmp_path: Path) -> None:
    for rows, more in {
        "outages": 'until = "to"', "repairs": 'kind = "what"', "nodes": 'gpus = "n"',
        "checks": 'check = "what"\nsymptom = "s"',
    }.items():  # fmt: skip
        node = "" if rows == "checks" else 'node = "host"\n'
        said = f'rows = "{rows}"\ndelimiter = ";"\n[columns]\ntime = "from"\n{node}{more}\n'
        text = "from;to;host;what;s;n\n2024-05-17;2024-05-18;n1;swap;disk;8\n"
        part, _ = reading(tmp_path, said, text)
        (row,) = part.tables[rows].rows(named=True)  # type: ignore[index]
        assert row["t_ns"] == 1715904000 * 10**9
        assert row.get("until_ns", 1715990400 * 10**9) == 1715990400 * 10**9
        assert row.get("gpus", 8) == 8 and row.get("kind", "swap") in ("swap", "")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (EVENTS.replace("columns", "colums"), "colums; did you mean columns"),
        (EVENTS.replace('node = "host"', 'nod = "host"'), "nod; did you mean node"),
        (EVENTS.replace('"nvlink"', '"nvlnk"'), "nvlnk; did you mean nvlink"),
        (EVENTS.replace('"warn"', '"wran"'), "wran; did you mean warn"),
        (EVENTS.replace("values.symptom", "values.simptom"), "simptom; did you mean symptom"),
        (EVENTS + "[times]\nzones = 'UTC'", "zones; did you mean zone"),
        (EVENTS + "[times]\nzone = 'Mars/Port'", "no time zone 'Mars/Port'"),
        (EVENTS + "[times]\nformat = 'iso'", "format 'iso' is unknown"),
        (EVENTS.replace("/nv-?link.*/", "/nv(/"), "pattern /nv"),
        (EVENTS.replace('node = "host"', ""), "needs node"),
        (EVENTS + 'node = "n1"\n', "no|nothing"),
        (EVENTS.replace("events", "evnts"), "rows is not known: evnts; did you mean events"),
        ("rows = ", "mapping"),
        ('rows = "events"\ntimes = 3', "Expected `object`, got `int`"),
    ],
)
def test_invalid_mappings_are_refused(tmp_path: Path, said: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_mapping(mapping(tmp_path, said))


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no column 'host'.*'when', 'what'"):
        reading(tmp_path, EVENTS, "when,what,text\n2024-05-17,ECC,\n")
    part, totals = reading(tmp_path, EVENTS, '{"when": "2024-05-17", "what": "ECC"}\n')
    assert (totals.rows, totals.records.total(), len(part.rejects)) == (1, 0, 1)


def test_clocks_that_show_an_hour_twice_or_not_at_all() -> None:
    texts = pl.Series(["2024-10-27 02:30:00", "2024-03-31 02:30:00", "2024-10-27 02:30:00+01:00"])
    found = parse_timestamps(texts, "Europe/Paris")
    assert seconds(found.ns) == [1729989000, None, 1729992600]
    assert (found.wrong.to_list(), found.twice) == ([False, True, False], 1)
    assert found.skipped.to_list() == [False, True, False]


def test_a_time_that_the_zone_skips_is_a_reject_that_names_the_zone(tmp_path: Path) -> None:
    rows = "when,host,what,text\n2024-03-31 02:30:00,n1,ECC,\n2024-03-31 04:30:00,n1,ECC,\n"
    _, totals = reading(tmp_path, EVENTS, rows, zone="Europe/Paris")
    assert totals.rejects == {f"{VANISHED}: time": 1} and totals.records.total() == 1


@pytest.mark.parametrize(
    ("text", "format_", "second"),
    [
        ("17/05/2024 10:00", "%d/%m/%Y %H:%M", 1715940000),
        ("May 17 2024 10:00:00 +0200", "%b %d %Y %H:%M:%S %z", 1715932800),
        ("1715940000123", "unix-ms", 1715940000),
        ("1715940000", "unix-ns", None),
        ("99999999999999999999", None, None),
        ("2024-05-17T10:00:00.123456789-0130", None, 1715945400),
        ("", None, None),
    ],
)
def test_timestamp_formats(text: str, format_: str | None, second: int | None) -> None:
    assert seconds(parse_timestamps(pl.Series([text]), "UTC", format_).ns) == [second]


ZONES = st.sampled_from(["UTC", "Europe/Paris", "America/St_Johns", "Asia/Kathmandu"])


@settings(max_examples=10)
@given(st.lists(st.integers(946_700_000, 4_102_400_000), min_size=1, max_size=20), ZONES)
def test_every_time_comes_back(times: list[int], zone: str) -> None:
    there = ZoneInfo(zone)
    for write in (
        str,
        lambda t: f"{t}.25",
        lambda t: f"{t}250000",
        lambda t: dt.datetime.fromtimestamp(t, there).isoformat(),
        lambda t: dt.datetime.fromtimestamp(t, dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
    ):
        found = parse_timestamps(pl.Series([write(t) for t in times]), zone)
        # a number of six more digits is one of microseconds
        assert seconds(found.ns) == times
        assert not found.wrong.any()


@settings(max_examples=15)
@given(st.text(max_size=300))
def test_no_text_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("mapped")
    (path / "log").write_text("when,host,what,text\n" + text, errors="replace")
    found = read_mapped(
        path / "log", load_mapping(mapping(path, EVENTS)), MappedLogContext("", "", TAKEN_NS)
    )
    for part in found:
        assert part.tables["findings"]["node"].is_in([""]).any() is False
    found.totals.check()


def test_out_of_range_numbers_are_rejected(tmp_path: Path) -> None:
    """Of GPUs below 0 or beyond all that there are, and of times longer than a century."""
    gpus = ["8", "-8", "9000000000000000000", "8", "8", "8"]
    lasted = ["5", "5", "5", "1e300", "nan", "1e9"]
    rows = [
        {"metadata": {"name": str(nth)}, "status": {"phase": "Failed", "start": 1715940000},
         "spec": {"gpus": many}, "lasted": long}
        for nth, (many, long) in enumerate(zip(gpus, lasted, strict=True))
    ]  # fmt: skip
    part, totals = reading(tmp_path, JOBS, "\n".join(map(json.dumps, rows)))
    assert part.tables["jobs"]["job"].to_list() == ["0"]
    said = [one.reason for one in part.rejects]
    assert said == ["no number: gpus"] * 2 + [NO_DURATION] * 3
    totals.check()


def test_nodes_that_a_row_names_count_and_not_their_number(tmp_path: Path) -> None:
    said = JOBS.replace('gpus = "spec.gpus"', 'gpus = "spec.gpus"\nnodes = "many"')
    row = {
        "metadata": {"name": "a"},
        "status": {"phase": "Done", "start": 1715940000, "end": 1715943600},
    }
    rows = [row | {"many": 7, "spec": {"nodes": names}} for names in (["n[1-2]"], [], ["n[1-7]"])]
    part, totals = reading(tmp_path, said, "\n".join(map(json.dumps, rows)))
    assert part.tables["jobs"]["nodes"].to_list() == [2, 7, 7]
    assert dict(totals.odd) == {OTHER_NODES: 1}
