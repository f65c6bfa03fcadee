"""Hostile logs and mappings: no hang, no exhausted memory or disk."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import LakeError
from outlast.fleet import ingestion as ingesting
from outlast.fleet.formats import log_reading
from outlast.fleet.lake import Lake

HEADER = "JobID|State|JobName|Start|End\n"
ROW = "1|COMPLETED|train|2024-05-17T00:00:00|2024-05-17T10:00:00\n"
KERNEL = 60 * "2024-05-17T10:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, x\n"
DEEP = "[" * 10_000 + "]" * 10_000


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str | Path) -> str:
    """What is said, of a lake that is not there afterwards."""
    assert main(["fleet", "ingest", str(tmp_path / "lake"), *map(str, words)]) in (1, 2)
    assert not (tmp_path / "lake").exists()
    return capsys.readouterr().err


def log(tmp_path: Path, text: str | bytes, mapping: str = "") -> Path:
    path = tmp_path / "log"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if mapping:
        (tmp_path / "log.toml").write_text(mapping)
    return path


def test_a_pipe_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for more in ((), ("--as", "sacct"), ("--as", "kernel")):
        assert "is no file" in refused(capsys, tmp_path, tmp_path / "pipe", *more)
    assert "is no file" in refused(capsys, tmp_path, "/dev/zero")
    (tmp_path / "run" / "events").mkdir(parents=True)
    os.mkfifo(tmp_path / "run" / "events" / "a.seg")
    assert "is no file" in refused(capsys, tmp_path, tmp_path / "run")
    found = refused(capsys, tmp_path, log(tmp_path, "a,b\n"), "--mapping", tmp_path / "pipe")
    assert "is no file" in found


@pytest.mark.parametrize("text", [HEADER + ROW, '{"jobs": [], "errors": []', KERNEL])
def test_a_bomb_is_not_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(log_reading, "UNPACKED_BYTES", 1 << 20)
    nothing = b"\n" * (8 << 20) if text != KERNEL else (b" " * 4095 + b"\n") * 2048
    bomb = log(tmp_path, gzip.compress(text.encode() + nothing))
    assert "unpacks to over 200 times" in refused(capsys, tmp_path, bomb)


def test_damage_in_what_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = bytearray(gzip.compress((HEADER + ROW * 100).encode()))
    packed[12:40] = b"\xff" * 28
    assert "damaged" in refused(capsys, tmp_path, log(tmp_path, bytes(packed)))
    with pytest.raises(zlib.error):
        gzip.decompress(packed)


def test_noise_does_not_fill_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingesting, "REJECTS_MAX", 1000)
    noise = log(tmp_path, HEADER + ROW + "a|b\n" * 120_000)
    said = refused(capsys, tmp_path, noise)
    assert "could not be read" in said and "120,000" not in said, "it was not read to its end"


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (f'{{"jobs": {DEEP}}}', ()),
        (f'{{"jobs": [{{"job_id": 1, "time": {DEEP}}}]}}', ()),
        (f'[{{"fault_start": 1, "x": {DEEP}}}]', ("--epoch", "2024-01-01")),
        (f'[{{"a": {DEEP}}}]', ("--mapping", "nodes.toml")),
        (f'{{"a": {DEEP}}}', ("--mapping", "nodes.toml")),
        ("a,b\n", ("--mapping", "deep.toml")),
    ],
)
def test_deeply_nested_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "nodes.toml").write_text('rows="nodes"\n[columns]\ntime="a"\nnode="a"\n')
    (tmp_path / "deep.toml").write_text("x=" + "[" * 100_000)
    words = [tmp_path / one if one.endswith(".toml") else one for one in more]
    assert "log" in refused(capsys, tmp_path, log(tmp_path, text), *words) or "deep.toml" in more


EVENTS = (
    'rows="events"\n[columns]\ntime="a"\nnode="b"\nsymptom="c"\n[constants]\ncheck="x"\n'
    'severity="warn"\n[values.symptom]\n'
)


def test_no_pattern_takes_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"a,b,c\n2024-01-01,n,{'a' * 100}!\n2024-01-01,n,AAA\n"
    path = log(tmp_path, text, EVENTS + '"/(a+)+/"="nvlink"\n"*"="other"\n')
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == {"findings": 2}


@pytest.mark.parametrize(
    "pattern",
    ["((a{1,1000}){1,1000}){1,1000}", "(a|" * 20_000 + "b" + ")" * 20_000, "(?=a)", "a)|(b", "["],
)
def test_a_pattern_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str
) -> None:
    path = log(tmp_path, "a,b,c\n2024-01-01,n,x\n", EVENTS + f"'/{pattern}/'=\"nvlink\"\n")
    assert "pattern /" in refused(capsys, tmp_path, path)


@pytest.mark.parametrize("when", ["0001-01-01", "1999-12-31", "2100-01-01", "9999-12-31", "0000"])
def test_a_moment_of_no_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    fault = '[{"node_id": "a", "event_time": 36000, "event_type": "fault_start"}]'
    said = refused(capsys, tmp_path, log(tmp_path, fault), "--epoch", when)
    assert "between 2000 and 2100" in said


@pytest.mark.parametrize("delimiter", ["\\x", "\\ud800", "\\N{no such}"])
def test_a_delimiter_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], delimiter: str
) -> None:
    path = log(tmp_path, HEADER + ROW)
    assert "--delimiter" in refused(capsys, tmp_path, path, "--delimiter", delimiter)


def test_a_line_without_an_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reading, "LINE_CHARS_MAX", 10)
    (tmp_path / "log").write_text("short\n" + "x" * 95 + "\n" + "y" * 10 + "\n123456789\nlast")
    with (tmp_path / "log").open() as file:
        found = list(log_reading.bounded_lines(file))
    assert found == ["short\n", "x" * 10, "y" * 10, "123456789\n", "last"]


def test_oversized_host_lists_are_refused_without_expansion() -> None:
    from outlast.errors import UsageError
    from outlast.fleet import host_lists

    for text in ("a[1-200000]" * 1000, "a" + "[0-999999999999]" * 1000, "a[1-200000],b[1-200000]"):
        for how in (host_lists.count, host_lists.expand):
            with pytest.raises(UsageError, match="over 262,144 hosts"):
                how(text)


@pytest.mark.parametrize("folder", ["jobs", "rejects", "jobs/day=2024-05-17"])
def test_nothing_is_written_or_removed_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    lake, elsewhere = tmp_path / "lake", tmp_path / "elsewhere"
    assert main(["fleet", "ingest", str(lake), str(log(tmp_path, HEADER + ROW))]) == 0
    elsewhere.mkdir()
    theirs = elsewhere / f"{'0' * 16}.parquet"
    theirs.write_text("theirs")
    if (lake / folder).exists():
        (lake / folder).rename(tmp_path / "moved")
    (lake / folder).symlink_to(elsewhere)
    capsys.readouterr()
    more = log(tmp_path, HEADER + ROW.replace("1|", "2|", 1) + "x|y\n")
    assert main(["fleet", "ingest", str(lake), str(more)]) == 1
    assert "is a link" in capsys.readouterr().err
    assert [each.name for each in elsewhere.iterdir()] == [theirs.name]


def test_a_lake_of_a_time_that_cannot_be_is_damaged(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert main(["fleet", "ingest", str(lake), str(log(tmp_path, HEADER + ROW))]) == 0
    manifest = json.loads((lake / "lake.json").read_text())
    manifest["parts"][0]["first_ns"] = 10**40
    (lake / "lake.json").write_text(json.dumps(manifest))
    with pytest.raises(LakeError, match="damaged"):
        Lake.open(lake)
