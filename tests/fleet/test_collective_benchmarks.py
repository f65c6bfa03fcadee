"""Reading of nccl-tests output of all versions, and rejection of damaged lines by name."""

from __future__ import annotations

import math
import random
from pathlib import Path
from zoneinfo import ZoneInfo

import polars as pl
import pytest
from msgspec.structs import replace
from tests.fleet.nccl_tests_output import SIZES, header, ranks, report, row, run
from tests.fleet.whole_log import read_whole

from outlast.cli.main import main
from outlast.errors import SourceError
from outlast.fleet.analysis.collective_bandwidth import (
    bandwidth_spread,
    compared_labels,
    measured_bandwidths,
    slow_groups,
    slow_hosts,
)
from outlast.fleet.formats import benchmark_rows, collective_benchmarks
from outlast.fleet.formats.format_detection import LogOptions, detect_format
from outlast.fleet.formats.log_reading import LogReading, RecordBatch
from outlast.fleet.record_tables import tables
from outlast.fleet.report.bandwidth_sections import BANDWIDTH_KEYS, bandwidth_sections
from outlast.fleet.report.fleet_report import build_report
from outlast.log_records import Bandwidth

TAKEN_NS = 1_780_000_000 * 10**9
PAIR = ("n1", "n2")
OLD = "# nThread 1 nGpus 8 minBytes 8 maxBytes 128 step: 2(factor) warmup iters: 5 iters: 20 \n"


def read(tmp_path: Path, text: str, name: str = "log.txt") -> tuple[RecordBatch, LogReading]:
    path = tmp_path / name
    path.write_text(text)
    assert detect_format(path, LogOptions()) == "nccl-tests"
    context = collective_benchmarks.BenchmarkContext("c", "", ZoneInfo("UTC"), TAKEN_NS)
    reading = collective_benchmarks.read_benchmark(path, context)
    return read_whole(reading), reading


def reasons(part: RecordBatch) -> set[str]:
    return {one.reason for one in part.rejects}


def test_a_run_has_its_hosts_sizes_and_bandwidths(tmp_path: Path) -> None:
    part, reading = read(tmp_path, run(PAIR, 400, cycles=2))
    found = part.tables["bandwidths"]
    assert found["size_bytes"].to_list() == [*SIZES, *SIZES]
    assert found["cycle"].to_list() == [0, 0, 0, 1, 1, 1]
    assert found["bus_bytes_per_s"].to_list()[1:3] == [400 * 10**9] * 2
    first = found.row(0, named=True)
    assert (first["hosts"], first["ranks"], first["collective"]) == ("n[1-2]", 16, "all_reduce")
    assert (first["redop"], first["root"], first["wrong"]) == ("sum", -1, 0)
    assert not part.rejects and not reading.totals.odd and found["run"].n_unique() == 1


@pytest.mark.parametrize(
    ("text", "redop", "wrong"),
    [
        (
            "nThread 1 nGpus 8 minBytes 8 maxBytes 128 \n" + ranks(PAIR, style="1.0")
            + "#  bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res\n"
            + row(1024, 4.0, op="   sum", wrong="0e+00"),
            "sum", None,
        ),
        (
            OLD + ranks(PAIR, style="2.11") + header("size count type", "error")
            + row(1024, 4.0, op="", wrong="0e+00"),
            "", None,
        ),
        (
            OLD + ranks(PAIR, style="2.11") + header("size count type redop", "error")
            + row(1024, 4.0, op="      ", wrong="N/A"),
            "", None,
        ),
        (OLD + "rccl-tests: Version develop:5272cd1\n" + ranks(PAIR) + header() + row(1024, 4.0),
         "sum", 0),
        (OLD + ranks(PAIR) + header() + row(1024, 4.0, wrong="N/A"), "sum", None),
    ],
)  # fmt: skip
def test_versions_differ_in_columns(
    tmp_path: Path, text: str, redop: str, wrong: int | None
) -> None:
    part, reading = read(tmp_path, text + " Avg bus bandwidth    : 4 \n", "all-gather_g1.txt")
    (one,) = part.tables["bandwidths"].to_dicts()
    assert (one["bus_bytes_per_s"], one["redop"], one["wrong"]) == (4 * 10**9, redop, wrong)
    assert (one["hosts"], one["ranks"], one["collective"]) == ("n[1-2]", 16, "all_gather")
    assert not part.rejects and not reading.totals.odd


def test_timestamps_and_iteration_columns(tmp_path: Path) -> None:
    block = "time algbw busbw #wrong i_min i_max i_p99 i_cv%"
    names = f"#  size count type redop root {block} {block}  timestamp\n"
    values = "  10.0  1.00  2.00  0  9.0  11.0  11.0  1.0"
    line = f"  1024  256  float  sum  -1{values}{values}  2026-05-17 10:00:00\n"
    part, _ = read(tmp_path, OLD + ranks(PAIR) + names + line + line.replace("2026", "1926"))
    (one,) = part.tables["bandwidths"].to_dicts()
    assert one["t_ns"] == 1_779_012_000 * 10**9 and one["bus_bytes_per_s"] == 2 * 10**9
    assert reasons(part) == {benchmark_rows.NO_TIME}


def test_json_has_its_own_time_and_label(tmp_path: Path) -> None:
    part, reading = read(tmp_path, report(PAIR))
    found = part.tables["bandwidths"]
    assert found["t_ns"].unique().to_list() == [1_779_012_000 * 10**9]
    assert found["label"].unique().to_list() == ["NCCL_IB_ADAPTIVE_ROUTING=1"]
    first = found.row(0, named=True)
    assert (first["ranks"], first["collective"], first["wrong"]) == (16, "all_reduce", 0)
    assert not reading.totals.odd
    nan = {"bus_bw": "nan", "nwrong": 0.0}
    bad = {"size": 8, "type": "f", "redop": "sum", "root": "-1", "in_place": nan}
    good = {**bad, "in_place": {"bus_bw": 1.0}}
    part, reading = read(tmp_path, report(PAIR, results=[bad, good, 3], out_of_bounds=None))
    assert reasons(part) == {benchmark_rows.NO_NUMBER, benchmark_rows.COLUMNS_DIFFER}
    assert reading.totals.odd[collective_benchmarks.CUT_OFF] == 1
    for text, why in (
        (report(PAIR)[:-40], "no complete JSON"),
        (report(PAIR, version=9), "version 9"),
    ):
        with pytest.raises(SourceError, match=why):
            read(tmp_path, text)


def test_damaged_rows_are_rejects(tmp_path: Path) -> None:
    good = row(1 << 20, 4.0)
    bad = [
        good.replace("  4.00", "   nan", 1),
        good.replace("  4.00", "  -4.0", 1),
        good[:60] + "n1:123:456 [0] NCCL INFO Channel 00\n",
        good[:-1] + " 1" * 5000 + "\n",
        good[:-1] + " " * 100_000 + "1\n",
    ]
    text = OLD + ranks(PAIR) + header() + good + "".join(bad) + row(0, 1.0)
    part, reading = read(tmp_path, text.replace("       0             0", "0 0"))
    assert len(part.rejects) == 4, part.rejects  # the end of the last is beyond what is examined
    assert reasons(part) == {benchmark_rows.NO_NUMBER, benchmark_rows.COLUMNS_DIFFER}
    assert part.tables["bandwidths"].height == 2
    assert reading.totals.skipped[collective_benchmarks.EMPTY] == 1
    assert reading.totals.odd[collective_benchmarks.CUT_OFF] == 2


def test_a_line_without_an_end_is_bounded(tmp_path: Path) -> None:
    part, _ = read(tmp_path, run(PAIR) + "8 2 float " + "1 " * (6 << 20))
    assert reasons(part) <= {collective_benchmarks.AT_ONCE} and len(part.rejects) == 4


def test_other_units_are_refused_row_by_row(tmp_path: Path) -> None:
    text = run(PAIR).replace("(GB/s)", "(MB/s)")
    path = tmp_path / "log.txt"
    path.write_text(text + run(("n3", "n4")))
    part, _ = read(tmp_path, path.read_text())
    assert reasons(part) == {collective_benchmarks.OTHER_UNITS} and len(part.rejects) == 3
    assert part.tables["bandwidths"]["hosts"].unique().to_list() == ["n[3-4]"]


def test_interleaved_runs_are_separated_by_prefix_only(tmp_path: Path) -> None:
    runs = [run((f"n{at}",), 100.0 + at).splitlines(keepends=True) for at in range(3)]
    mixed = "".join(f"{at}: {line}" for lines in zip(*runs, strict=True)
                    for at, line in enumerate(lines))  # fmt: skip
    part, _ = read(tmp_path, mixed)
    found = part.tables["bandwidths"]
    assert sorted(found["hosts"].unique()) == ["n0", "n1", "n2"] and not part.rejects
    tagged = "".join(f"[1,0]<stdout>:{line}" for line in runs[0])
    assert read(tmp_path, tagged)[0].tables["bandwidths"]["hosts"].unique().to_list() == ["n0"]
    bare = "".join(line for lines in zip(*runs, strict=True) for line in lines)
    part, _ = read(tmp_path, bare)
    assert reasons(part) == {collective_benchmarks.AT_ONCE}
    assert not part.tables["bandwidths"].height


def test_several_runs_in_one_file_each_have_their_collective(tmp_path: Path) -> None:
    cut = run(PAIR).split("# Out of")[0]
    part, reading = read(tmp_path, cut + run(PAIR, collective="alltoall") + run(PAIR, 300))
    found = part.tables["bandwidths"]
    assert (
        found["collective"].to_list() == ["all_reduce"] * 3 + ["alltoall"] * 3 + ["all_reduce"] * 3
    )
    assert found["run"].n_unique() == 3
    assert reading.totals.odd == {collective_benchmarks.CUT_OFF: 3}


def test_wrong_values_and_errors_are_findings_on_hosts(tmp_path: Path) -> None:
    error = "n7: Test CUDA failure common.cu:303 'uncorrectable ECC error encountered'\n"
    half = run(PAIR, wrong=2).replace(row(SIZES[1], 400, wrong=2), error)
    part, reading = read(tmp_path, half + run(("n9",), wrong=1))
    found = part.tables["findings"].sort("node").select("node", "severity", "symptom").rows()
    assert found == [
        ("n1", "warn", "other"), ("n2", "warn", "other"), ("n7", "warn", "gpu-driver"),
        ("n9", "drain", "other"),
    ]  # fmt: skip
    reading.totals.check()


def bandwidths(
    groups: dict[str, list[float]], label: str = "", size: int = 1 << 30
) -> list[Bandwidth]:
    return [
        Bandwidth(
            t_ns=TAKEN_NS + at, cluster="", run=f"{hosts}{label}{at}", label=label, hosts=hosts,
            ranks=16, collective="all_reduce", datatype="float", redop="sum", root=-1,
            size_bytes=size, cycle=0, bus_bytes_per_s=round(value * 1e9),
            in_place_bytes_per_s=None, wrong=int(value == 1.0),
        )
        for hosts, values in groups.items()
        for at, value in enumerate(values)
    ]  # fmt: skip


def measured(*records: Bandwidth) -> pl.DataFrame:
    return measured_bandwidths(tables(records, TAKEN_NS - 10, TAKEN_NS + 10**9))


def test_spread_of_groups_and_of_iterations() -> None:
    found = measured(*bandwidths({"a": [99, 101], "b": [199, 201]}))
    (one,) = bandwidth_spread(found).to_dicts()
    assert (one["least"], one["median"], one["most"]) == (99, 150, 201)
    assert one["cv_groups"] == pytest.approx(math.sqrt(5000) / 150)
    assert one["cv_iterations"] == pytest.approx(math.sqrt(2) / 150)
    (alone,) = bandwidth_spread(measured(*bandwidths({"a": [99]}))).to_dicts()
    assert alone["cv_groups"] is None and alone["cv_iterations"] is None


def test_a_run_that_is_read_again_counts_once() -> None:
    once = bandwidths({"a": [99]})
    again = [replace(one, t_ns=TAKEN_NS + 5) for one in once]
    assert measured(*once, *again).height == 1


def test_slow_groups_and_the_node_that_they_share() -> None:
    random_ = random.Random(3)
    nodes = [f"n{at:02d}" for at in range(40)]
    groups: dict[str, list[float]] = {}
    for _ in range(4):
        random_.shuffle(nodes)
        for at in range(0, 40, 2):
            pair = sorted(nodes[at : at + 2])
            slow = "n07" in pair
            groups[",".join(pair)] = [random_.gauss(200 if slow else 380, 4)]
    found = measured(*bandwidths(groups))
    slow = slow_groups(found)
    assert sorted(slow.filter("is_slow")["hosts"]) == sorted(one for one in groups if "n07" in one)
    hosts = slow_hosts(found, slow)
    assert hosts.filter("suspected")["node"].to_list() == ["n07"]
    n, k = len(groups), int(slow["is_slow"].sum())
    assert hosts.row(0, named=True)["p"] == pytest.approx(1 / math.comb(n, k))


def test_noise_is_no_slow_group_and_small_sizes_are_not_judged() -> None:
    random_ = random.Random(5)
    many = {f"g{at}": [random_.gauss(380, 8)] for at in range(64)}
    assert not slow_groups(measured(*bandwidths(many)))["is_slow"].any()
    small = {f"g{at}": [0.1 if at == 3 else 5.0] for at in range(64)}
    both = measured(*bandwidths(many), *bandwidths(small, size=1 << 10))
    assert slow_groups(both)["judged"].unique().to_list() == [1]
    few = {"a": [10], "b": [10], "c": [10], "d": [1.5]}
    assert not len(slow_groups(measured(*bandwidths(few))))


def test_labels_are_compared_in_equal_settings() -> None:
    off = bandwidths({f"g{at}": [200.0 + 10 * at] for at in range(9)}, "off")
    on = bandwidths({f"g{at}": [380.0 + at] for at in range(9)}, "on")
    (one,) = compared_labels(measured(*off, *on)).to_dicts()
    assert (one["basis"], one["label"], one["units"]) == ("off", "on", "groups")
    assert one["ratio"] == pytest.approx(384 / 240) and one["low"] < one["ratio"] < one["high"]
    assert one["basis_cv"] > 10 * one["cv"]
    assert not len(compared_labels(measured(*off)))


def test_the_report_has_sections_only_with_benchmarks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label, low in (("off", 100.0), ("on", 390.0)):
        (tmp_path / label).mkdir()
        for at in range(6):
            bus = low if at == 2 else 400.0
            text = "".join(run((f"n{at}", f"m{at}"), bus + one) for one in range(3))
            (tmp_path / label / f"{at}.txt").write_text(text)
        logs = map(str, sorted((tmp_path / label).iterdir()))
        more = ["--label", "{folder}", "--at", "2026-05-01"]
        assert main(["fleet", "ingest", str(tmp_path / "lake"), *logs, *more]) == 0
    capsys.readouterr()
    assert main(["fleet", "report", str(tmp_path / "lake"), "--json"]) == 0
    answer = capsys.readouterr().out
    assert all(f'"key":"{key}"' in answer for key in BANDWIDTH_KEYS)
    assert '"panel":"groups"' in answer and '"panel":"iterations"' in answer
    records = bandwidths({f"g{at}": [100.0 if at == 2 else 400.0 + at] for at in range(9)})
    made = tables(records, TAKEN_NS, TAKEN_NS + 10**9)
    drawn = list(bandwidth_sections(made))
    assert [one.section.key for one in drawn] == ["bandwidth", "slow-groups", "slow-hosts"]
    assert [one["group"] for one in drawn[1].section.rows] == ["g2"]
    done: list[tuple[int, int]] = []
    quiet = build_report(
        tables([], TAKEN_NS, TAKEN_NS + 10**9), "x", on_progress=lambda *one: done.append(one)
    )
    assert not {one.key for one in quiet.report.sections} & {*BANDWIDTH_KEYS}
    assert done[-1][0] == done[-1][1]
