"""Messages of `outlast fleet ingest`."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window
from outlast.fleet.record_tables import DAY_NS

HEADER = "JobID|JobName|State|Start|End\n"


def said(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = EXIT_DONE) -> str:
    assert main(["fleet", "ingest", *map(str, words)]) == code
    out, err = capsys.readouterr()
    return " ".join(f"{out} {err}".replace("│", " ").split())


def row(job: int | str, name: str = "train") -> str:
    return f"{job}|{name}|COMPLETED|2024-05-17T00:00:00|2024-05-17T10:00:00\n"


def test_a_single_item_is_printed_in_the_singular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(HEADER + row(1))
    found = said(capsys, tmp_path / "lake", tmp_path / "log")
    assert " 1 row: 1 job " in found and "lake holds 1 job from" in found


def test_a_row_that_a_log_has_twice_was_not_in_the_lake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(HEADER + row(1) + row(1))
    assert "2 read, 1 of them known already" in said(capsys, tmp_path / "lake", tmp_path / "log")


def test_of_a_thousand_logs_those_are_shown_that_have_something_odd(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [tmp_path / f"n{k}.log" for k in range(25)]
    for k, path in enumerate(logs):
        path.write_text(f"2024-05-17T10:00:{k:02d}+00:00 n{k} kernel: NVRM: Xid (PCI:0): 79, x\n")
    logs[3].write_text(logs[3].read_text() + "2024-05-17T10:00:00+00:00 n3 kernel: NVRM: Xid x\n")
    found = said(capsys, tmp_path / "lake", *logs)
    assert "n3.log: kernel" in found and "1 rejected" in found and "n4.log" not in found
    assert "24 logs without remarks" in found and "findings: 25 read" in found
    again = said(capsys, tmp_path / "lake", *logs)
    assert "25 logs without remarks, 25 of them read before" in again


def test_a_log_of_job_steps_only_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(HEADER + row("1.batch") + row("1.0"))
    found = said(capsys, tmp_path / "lake", tmp_path / "log")
    assert "2 left out as no record: step of a job" in found
    assert "all rows are of steps, none of a job" in found


def test_times_since_boot_name_the_flag_boot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dmesg").write_text("[  201.654822] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    words = [tmp_path / "lake", tmp_path / "dmesg", "--node", "n1"]
    assert "pass it with --boot" in said(capsys, *words, code=EXIT_USER_ERROR)
    assert "1 finding" in said(capsys, *words, "--boot", "2024-05-17")


@pytest.mark.parametrize(
    ("text", "naive"),
    [
        (HEADER + "1|train|FAILED|2024-05-17T00:00:00|2024-05-17T10:00:00\n", True),
        (HEADER + "1|train|FAILED|2024-05-17T00:00:00Z|2024-05-17T10:00:00Z\n", False),
        ("[Fri May 17 10:00:00 2024] NVRM: Xid (PCI:0000:3b:00): 79, x\n", True),
        ("May 17 10:00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, x\n", True),
        ("2024-05-17T10:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, x\n", False),
        ("2024-05-17T10:00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, x\n", True),
    ],
)
def test_an_assumed_time_zone_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, naive: bool
) -> None:
    """Accounting in local time beside a kernel's log in UTC: no failure has a cause then."""
    (tmp_path / "log").write_text(text)
    node = () if text.startswith("JobID") else ("--node", "n1")
    words = ("taken for UTC", "--zone NAME reads them in another")
    found = said(capsys, tmp_path / "lake", tmp_path / "log", *node)
    assert all((word in found) == naive for word in words)
    told = said(capsys, tmp_path / "other", tmp_path / "log", *node, "--zone", "UTC")
    assert not any(word in told for word in words)


def test_a_custom_policy_applies_to_kernel_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("2024-05-17T10:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0): 79, x\n")
    (tmp_path / "xid.toml").write_text('[xid]\n79 = { severity = "warn" }\n')
    words = [tmp_path / "lake", tmp_path / "log", "--policy", tmp_path / "xid.toml"]
    assert "1 finding" in said(capsys, *words)
    (found,) = Lake.open(tmp_path / "lake").tables().findings.collect().to_dicts()
    assert (found["code"], found["severity"]) == ("XID 79", "warn")
    (tmp_path / "sacct").write_text(HEADER + row(1))
    words[1] = tmp_path / "sacct"
    assert "--policy goes with kernel" in said(capsys, *words, code=EXIT_USAGE)


def test_one_wrong_year_does_not_move_the_last_days_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lemons of the last 28 days were none then, as nothing ran in those days."""
    (tmp_path / "log").write_text(
        HEADER
        + row(1)
        + row(2).replace("2024-05-17T10", "2024-05-18T10")
        + row(3).replace("2024", "2094")
    )
    found = said(capsys, tmp_path / "lake", tmp_path / "log")
    assert "1 unusual, but kept: records of a time in the future" in found
    lake = Lake.open(tmp_path / "lake")
    assert load_window(lake).until_ns < lake.until_ns - 50 * 365 * DAY_NS
    assert load_window(lake).jobs.collect()["job"].sort().to_list() == ["1", "2"]
    assert load_window(lake, until="2095-01-01").jobs.collect().height == 3


def test_a_missing_lake_argument_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text(HEADER + row(1))
    (tmp_path / "b").write_text(HEADER + row(2))
    found = said(capsys, tmp_path / "a", tmp_path / "b", code=EXIT_USAGE)
    assert "is a file, and a lake is a directory" in found
    assert (tmp_path / "a").read_text() == HEADER + row(1)


def test_a_disk_that_is_full_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was once called None."""
    names = "".join(row(k, f"{k * 7919 % 1_000_003:x}") for k in range(20_000))
    (tmp_path / "log").write_text(HEADER + names)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        found = said(capsys, tmp_path / "lake", tmp_path / "log", code=EXIT_USER_ERROR)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written: File too large" in found and "it is unchanged" in found
    assert not (tmp_path / "lake").exists()


def test_a_log_that_was_read_with_other_options_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option or a mapping that was corrected changes nothing: its flag is named, not hidden."""
    lake, kernel, jobs = tmp_path / "lake", tmp_path / "n1.log", tmp_path / "jobs.csv"
    kernel.write_text("[  100.5] NVRM: Xid (PCI:0): 79, x\n[Tue Dec 31 23:59:58 2024] booted\n")
    assert "pass it with --boot" in said(capsys, lake, kernel, "--node", "n1")
    assert "nothing to do" in said(capsys, lake, kernel, "--node", "n1")
    corrected = said(capsys, lake, kernel, "--node", "n1", "--boot", "2024-05-01")
    assert "nothing to do" not in corrected
    assert "with another --boot: its records and rejects stay as they were" in corrected
    jobs.write_text("id,how,end\n1,ZOMBI,2024-05-01T00:00:00Z\n2,DONE,2024-05-01T00:00:00Z\n")
    mapping = 'rows = "jobs"\n[columns]\njob = "id"\nstate = "how"\nend = "end"\n'
    (tmp_path / "jobs.toml").write_text(mapping)
    assert "lacks words of this log: 'ZOMBI'" in said(capsys, lake, jobs)
    (tmp_path / "jobs.toml").write_text(f'{mapping}[values.state]\nZOMBI = "FAILED"\n')
    assert "with another --mapping" in said(capsys, lake, jobs)
    zoned = said(capsys, lake, jobs, "--zone", "Europe/Paris")
    assert "with another --mapping and --zone" in zoned
    assert Lake.open(lake).manifest.sources[1].records == {"jobs": 1}


@pytest.mark.parametrize("flags", [("--node", "node-1"), ("--cluster", "alpha"), ()])
def test_a_log_that_names_its_node_is_read_once_whatever_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    """Its findings, on another node or cluster, would count twice."""
    lake, log, copy = tmp_path / "lake", tmp_path / "n1.log", tmp_path / "copy.log"
    log.write_text("2024-05-17T10:00:00+00:00 n1 kernel: NVRM: Xid (PCI:0): 79, x\n")
    copy.write_bytes(log.read_bytes())
    assert "1 finding" in said(capsys, lake, log)
    differing = f"with another {flags[0]}: its records" if flags else "nothing to do"
    assert differing in said(capsys, lake, log, *flags)
    assert differing in said(capsys, lake, copy, *flags)
    assert Lake.open(lake).tables().findings.collect().height == 1
    again = tmp_path / "again"
    assert "1 finding" in said(capsys, again, log, *flags)
    assert ("with another" in said(capsys, again, log)) == bool(flags)
    assert Lake.open(again).tables().findings.collect().height == 1


def test_accounting_without_a_cluster_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sacct").write_text(HEADER + row(1))
    said(capsys, tmp_path / "lake", tmp_path / "sacct")
    found = said(capsys, tmp_path / "lake", tmp_path / "sacct", "--cluster", "alpha")
    assert "with another --cluster" in found
    assert Lake.open(tmp_path / "lake").tables().jobs.collect().height == 1


def test_equal_logs_of_two_nodes_that_do_not_name_them_are_both_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "[Fri May 17 10:00:00 2024] NVRM: Xid (PCI:0000:3b:00): 79, x\n"
    for name in ("n1", "n2"):
        (tmp_path / f"{name}.log").write_text(text)
        said(capsys, tmp_path / "lake", tmp_path / f"{name}.log", "--node", "{name}")
    found = Lake.open(tmp_path / "lake").tables().findings.collect()
    assert sorted(found["node"]) == ["n1", "n2"]
    n1 = (tmp_path / "lake", tmp_path / "n1.log")
    assert "nothing to do" in said(capsys, *n1, "--node", "n1")
