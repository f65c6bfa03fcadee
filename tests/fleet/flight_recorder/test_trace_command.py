"""`outlast fleet trace`: output and exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tests.fleet.flight_recorder.recorded_jobs import STEP_NS, T_NS, Job, played, write

from outlast.cli.fleet.trace import trace
from outlast.cli.main import main
from outlast.errors import CorruptionError, StorageError, UsageError
from outlast.fleet.flight_recorder.hang_report import HangReport
from outlast.log_records import Finding, Severity

Say = Callable[..., str]
JOB = Job(world=3, groups=((0, 1, 2),), calls=(0,) * 6)
WAIT_NS = T_NS + 3 * STEP_NS  # ranks 0 and 1 enter the fourth then
KERNEL = """\
2023-11-14T22:10:00.000000+00:00 n3 kernel: Linux version 6.8.0
2023-11-14T22:13:19.000000+00:00 n3 kernel: NVRM: Xid (PCI:0000:1b:00): 79, GPU is off the bus
2023-11-14T22:13:20.000000+00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python
"""
NODES = "0 n1\n1 n2.site\n# rank 2\n2 n3.site\n"


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Rank 2 stays away from the fourth of six."""
    folder = tmp_path / "dumps"
    write(folder, played(JOB, 2, 3, gloo=True, told=False)[0])
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Say:
    def said(*paths: Path, **more: object) -> str:
        assert trace(*paths, **more) == 0  # pyright: ignore[reportArgumentType]
        return " ".join(capsys.readouterr().out.split())

    return said


def _report(text: str) -> HangReport:
    return msgspec.json.decode(text, type=HangReport)


def test_rank_collective_and_time_are_printed(dumps: Path, run: Say) -> None:
    said = run(dumps)
    assert "Rank 2 never entered all_reduce 4 of group 0 (default_pg), which ranks 0-1" in said
    assert "2023-11-14 22:13:23.000000 UTC" in said
    assert "The last that rank 2 entered is all_reduce 3" in said
    assert "3 of 3 ranks" in said
    report = _report(run(dumps, json=True))
    assert (report.ranks, report.stuck[0].seq, report.confidence) == ((2,), 4, "sure")


def test_pickles_and_single_files_are_as_good(dumps: Path, tmp_path: Path, run: Say) -> None:
    other = tmp_path / "pickles"
    write(other, played(JOB, 2, 3, gloo=True, told=False)[0], as_pickle=True)
    assert _report(run(other, json=True)).stuck == _report(run(dumps, json=True)).stuck
    files = sorted(other.iterdir())
    assert _report(run(*files, json=True)).stuck == _report(run(dumps, json=True)).stuck


def test_unusable_files_are_reported_and_skipped(dumps: Path, run: Say) -> None:
    (dumps / "rank_1.json").write_bytes((dumps / "rank_1.json").read_bytes()[:300])
    (dumps / "README").write_text("notes")
    (dumps / "dump.json").write_bytes((dumps / "rank_0.json").read_bytes())
    (dumps / "rank_5.json").symlink_to(dumps / "rank_0.json")
    os.mkfifo(dumps / "rank_6.json")
    report = _report(run(dumps, json=True))
    assert (report.read, report.missing, report.ranks) == ((0, 2), (1,), (2,))
    assert "it is unknown" in report.verdict
    reasons = " ".join(unread.reason for unread in report.unread)
    assert [unread.rank for unread in report.unread] == [None, None, 1]
    assert "cut off or damaged" in reasons
    assert "its name has no rank" in reasons


def test_a_rank_with_two_dumps_and_two_moments(dumps: Path, tmp_path: Path, run: Say) -> None:
    late = played(JOB, 2, 5, gloo=True)[0][0]
    (dumps / "trace_0").write_bytes(msgspec.json.encode(late))
    report = _report(run(dumps, json=True))
    assert report.last[2].seq == 3
    assert "several dumps of rank 0" in report.notes[0]
    write(tmp_path / "all" / "later", {0: late})
    write(tmp_path / "all" / "first", {0: late})
    with pytest.raises(UsageError, match="of one trace"):
        trace(tmp_path / "all")


def test_a_run_directory_names_its_traces(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="no traces"):
        trace(tmp_path)
    for name in ("2026-01-02T00-00-00.000Z", "2026-01-01T00-00-00.000Z"):
        (tmp_path / "traces" / name).mkdir(parents=True)
    with pytest.raises(UsageError, match=r"name one, as in .*/traces/2026-01-02T"):
        trace(tmp_path)


def test_the_only_trace_of_a_run_needs_no_name(dumps: Path, tmp_path: Path, run: Say) -> None:
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    dumps.rename(tmp_path / "run" / "traces" / "2026-01-01T00-00-00.000Z")
    assert _report(run(tmp_path / "run", json=True)).ranks == (2,)


def test_a_rank_without_any_record_is_named_as_absent(dumps: Path, run: Say) -> None:
    """It hangs before its first collective: torch's JSON then has no entries."""
    (dumps / "rank_2.json").write_text('{"version": "2.10", "pg_config": {}, "pg_status": {}}')
    report = _report(run(dumps, json=True))
    assert (report.ranks, report.stuck[0].kind, report.missing) == ((2,), "absent", ())
    assert "entered nothing" in report.verdict


def test_folders_name_hosts(dumps: Path, tmp_path: Path, run: Say) -> None:
    for rank in range(3):
        node = tmp_path / "nodes" / f"node{rank}"
        node.mkdir(parents=True)
        (dumps / f"rank_{rank}.json").rename(node / f"rank_{rank}.json")
    assert _report(run(tmp_path / "nodes", json=True)).hosts == {
        0: "node0", 1: "node1", 2: "node2",
    }  # fmt: skip


def test_missing_dumps_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no dumps were given"):
        trace()
    with pytest.raises(UsageError, match="no such file"):
        trace(tmp_path / "none")
    with pytest.raises(UsageError, match="there is no file"):
        trace(tmp_path)
    (tmp_path / "rank_0").write_bytes(b"")
    with pytest.raises(CorruptionError, match="the file is empty"):
        trace(tmp_path)


def _found(node: str, before_s: float, code: str, severity: Severity = "now") -> Finding:
    return Finding(
        t_ns=WAIT_NS - int(before_s * 1e9), cluster="c", node=node, check="xid",
        symptom="gpu-unavailable", severity=severity, code=code, device="0000:1b:00",
        detail="GPU has fallen off the bus",
    )  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(NODES)
    return path


def test_findings_on_the_node_of_the_rank_are_printed(
    dumps: Path, hosts: Path, tmp_path: Path, run: Say
) -> None:
    """Of its own node, in these minutes, what is worst and closest comes first."""
    findings = [
        _found("n1", 1, "XID 31"),  # another rank's
        _found("n3", 700, "XID 48"),  # too early
        _found("n3", -400, "XID 94"),  # too late
        _found("n3", 2, "XID 63", "warn"),
        _found("n3", 4, "XID 79"),
        _found("n3", 90, "XID 13"),
        _found("n3", 1, "", "healthy"),
    ]
    path = tmp_path / "findings.jsonl"
    lines = [msgspec.json.encode(one) for one in findings]
    path.write_bytes(b"\n".join([*lines, b"no finding", b""]))
    said = run(dumps, findings=path, hosts=hosts)
    assert "The node of rank 2, n3, had XID 79 (gpu-unavailable, 0000:1b:00) 4.0 seconds" in said
    assert "note:" in said
    report = _report(run(dumps, findings=path, hosts=hosts, json=True))
    assert [one.code for one in report.health] == ["XID 79", "XID 13", "XID 63"]
    assert "1 line(s) are no findings" in " ".join(report.notes)
    path.write_bytes(
        msgspec.json.encode({"version": 1, "findings": findings}) + b"\n" + b"[" * 9999
    )
    again = _report(run(dumps, findings=path, hosts=hosts, json=True))
    assert again.health == report.health, "from a report of outlast check as well"


def test_kernel_logs_in_a_lake_give_the_findings_of_the_node(
    dumps: Path, hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, lake = tmp_path / "kernel.log", tmp_path / "lake"
    log.write_text(KERNEL)
    assert main(["fleet", "ingest", str(lake), str(log)]) == 0
    capsys.readouterr()
    asked = ["fleet", "trace", str(dumps), "--lake", str(lake), "--hosts", str(hosts)]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 2 never entered all_reduce 4" in said
    assert "The node of rank 2, n3, had XID 79" in said
    assert "4.0 seconds before." in said
    for path in dumps.iterdir():  # a year later, of which the lake knows nothing
        path.write_text(path.read_text().replace(":170000000", ":173000000"))
    assert main(asked) == 0
    assert "has no records of that time" in capsys.readouterr().out


def test_a_host_that_is_not_known_was_not_looked_at(
    dumps: Path, hosts: Path, tmp_path: Path, run: Say
) -> None:
    path = tmp_path / "findings.jsonl"
    path.write_bytes(msgspec.json.encode(_found("n9", 4, "XID 79")))
    assert "host of rank 2 is unknown" in run(dumps, findings=path)
    assert "no health findings on the nodes" in run(dumps, findings=path, hosts=hosts)


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"findings": Path("none.jsonl")}, UsageError, "none.jsonl"),
        ({"hosts": Path("none")}, UsageError, "none"),
        ({"world": 0}, UsageError, "from 1 to"),
        ({"lake": Path("a"), "findings": Path("b")}, UsageError, "one of them"),
    ],
)
def test_wrong_arguments_are_named(
    dumps: Path, more: dict[str, object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        trace(dumps, **more)  # pyright: ignore[reportArgumentType]


def test_files_of_other_kinds_are_refused(dumps: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("no json\n")
    with pytest.raises(CorruptionError, match="line 1"):
        trace(dumps, findings=other)
    other.write_text("two hosts here\n")
    with pytest.raises(UsageError, match="line 1"):
        trace(dumps, hosts=other)
    with pytest.raises(Exception, match="no lake") as refused:
        trace(dumps, lake=tmp_path)
    assert not isinstance(refused.value, StorageError)
