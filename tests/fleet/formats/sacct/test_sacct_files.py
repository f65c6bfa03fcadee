"""sacct files: encodings, truncation and other content, without a lost row."""

import gzip
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.sacct_log import HEADER, ROW, read, row

from outlast.cli.main import main
from outlast.errors import SourceError, UsageError
from outlast.fleet.formats import sacct
from outlast.fleet.formats.log_reading import ReadTotals
from outlast.fleet.lake import renumber_attempts


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: text.replace("\n", "|\n"),
        lambda text: text.replace("|", "|#"),
        lambda text: text.replace("|", "\t"),
        lambda text: text.replace("|", "\x1f"),
        lambda text: text.replace("\n", "\n\n"),
        lambda text: "\n\n" + text,
    ],
)
def test_the_same_text_in_other_clothes(tmp_path: Path, change: Any) -> None:
    text = "\n".join([HEADER, ROW, row(jobid="8", jobname='"a'), ""])
    plain, _ = read(tmp_path, text)
    other, totals = read(tmp_path, change(text))
    assert other.tables["jobs"].equals(plain.tables["jobs"])
    assert not other.rejects
    assert (totals.rows, plain.tables["jobs"].height) == (2, 2)


def test_gzip_is_undone(tmp_path: Path) -> None:
    part, _ = read(tmp_path, gzip.compress(f"{HEADER}\n{ROW}\n".encode()))
    assert part.tables["jobs"].height == 1
    with pytest.raises(SourceError, match="cannot be read to its end"):
        read(tmp_path, gzip.compress(f"{HEADER}\n{ROW}\n".encode() * 9000)[:-9])


def test_a_whole_reading_counts_attempts_over_all_its_parts(tmp_path: Path) -> None:
    path = tmp_path / "sacct.txt"
    day = "2024-05-17T1"
    rows = [
        row(start=f"{day}{hour}:00:00", end=f"{day}{hour}:00:10") for hour in (3, 1, 2, 6, 5, 4)
    ]
    path.write_text("\n".join([HEADER, *rows]))
    parts = list(sacct.read_sacct(path, sacct.SacctOptions(block_bytes=3 * len(ROW))))
    jobs = pl.concat([part.tables["jobs"] for part in parts if "jobs" in part.tables])
    assert len(parts) > 2
    assert renumber_attempts(jobs.lazy()).collect()["attempt"].to_list() == [2, 0, 1, 5, 4, 3]


def test_rows_that_are_nowhere_are_a_fault_of_the_reader() -> None:
    totals = ReadTotals(rows=3)
    totals.records["jobs"] = 2
    with pytest.raises(AssertionError, match="3 rows were read, but 2 are accounted for"):
        totals.check()


def test_a_message_above_the_header_is_a_reject(tmp_path: Path) -> None:
    part, _ = read(tmp_path, f"sacct: warning: slow\n{HEADER}\n{ROW}\n")
    assert [(one.line, one.reason) for one in part.rejects] == [(1, "is before the header")]
    assert part.tables["jobs"].height == 1


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"AVAIL|CPUS|NODES\nup|4|8\n", "no header of sacct"),
        (ROW.encode(), "no header of sacct"),
        (b'"JobID","State","Start","End"\n"1","FAILED","",""\n', "quotes around its fields"),
        (b"JobID|State\n1|FAILED\n", "no column Start, End"),
        (b"JobName|State|Start|End\n", "no column JobID"),
        (b"JobID     JobName   State      Start     End\n------\n", "is a table for display"),
        (b"\xff\xfeJ\0o\0", "UTF-16"),
        (b"PAR1....", "Parquet"),
        (b"\x28\xb5\x2f\xfd....", "zstd"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: bytes, match: str) -> None:
    with pytest.raises(SourceError, match=match):
        read(tmp_path, text)


def test_a_log_without_header_needs_its_columns(tmp_path: Path) -> None:
    part, _ = read(tmp_path, ROW, columns=tuple(HEADER.lower().split("|")))
    assert part.tables["jobs"]["gpus"].item() == 16
    with pytest.raises(SourceError, match="no column 'Jobs'"):
        read(tmp_path, ROW, columns=("Jobs", "State"))


def test_options_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="no time zone"):
        sacct.SacctOptions(zone="Mars/Base")
    with pytest.raises(UsageError, match="cannot separate"):
        sacct.SacctOptions(delimiter="a")


def test_nothing_readable_is_refused_with_the_commonest_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sacct.txt"
    path.write_text("\n".join([HEADER, *[row(state="?")] * 3, row(jobid="x")]))
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(path)]) == 1
    printed = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().err).split())
    assert "none of its 4 rows could be read; of 3: no job state" in printed


fields = st.fixed_dictionaries(
    {},
    optional={
        "jobid": st.sampled_from(["7", "8_1", "8.0", "9+1", "10_[1-2]", "x", ""]),
        "jobname": st.text(st.sampled_from("a|\n\\ é\t'\""), max_size=6),
        "state": st.sampled_from(["FAILED", "PENDING", "CANCELLED by 3", "RUNNING", "?", ""]),
        "start": st.sampled_from(["Unknown", "", "2024-05-17T10:59:59", "1715940010", "x"]),
        "end": st.sampled_from(["Unknown", "", "2024-05-17T11:00:10Z", "2023-05-17T11:00:10"]),
        "elapsedraw": st.sampled_from(["", "-3", "3600", "x"]),
        "nodelist": st.sampled_from(["", "None assigned", "n[1-", "m"]),
        "alloctres": st.sampled_from(["", "gres/gpu=x", "node=4"]),
    },
)


@settings(max_examples=25)
@given(st.lists(st.one_of(fields.map(lambda one: row(**one)), st.text("a|\n", max_size=20)),
                max_size=8), st.integers(200, 900))  # fmt: skip
def test_nothing_vanishes_however_the_log_is_cut(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], block_bytes: int
) -> None:
    """Sums agree (`read` checks), and blocks do not change what is read."""
    folder = tmp_path_factory.mktemp("cut")
    text = "\n".join([HEADER, *rows, ""])
    whole, totals = read(folder, text)
    cut, again = read(folder, text, block_bytes=block_bytes)
    assert again.rows == totals.rows
    assert (again.skipped, again.rejects, again.odd) == (totals.skipped, totals.rejects, totals.odd)
    assert sorted(cut.rejects, key=str) == sorted(whole.rejects, key=str)
    if whole.tables:
        left, right = (
            part.tables["jobs"].drop("attempt").sort(pl.all().exclude("attempt"))
            for part in (whole, cut)
        )
        assert left.equals(right)
