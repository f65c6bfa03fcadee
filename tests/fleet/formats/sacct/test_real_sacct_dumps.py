"""Real sacct dumps of several sites and versions, against counts made by hand."""

from collections import Counter
from pathlib import Path

import pytest
from tests.fleet.whole_log import read_whole

from outlast.errors import SourceError
from outlast.fleet import host_lists
from outlast.fleet.formats import sacct
from outlast.fleet.formats.log_reading import ReadTotals, RecordBatch

STEP = "step of a job"
XDMOD = (
    "jobid jobidraw cluster partition qos account group gid user uid submit eligible start end"
    " elapsed exitcode state nnodes ncpus reqcpus reqmem reqgres reqtres timelimit nodelist jobname"
)


@pytest.fixture
def dumps(traces: Path) -> Path:
    found = traces / "sacct_fixtures"
    if not found.is_dir():
        pytest.skip("the dumps of sacct are not on this machine")
    return found


def read(path: Path, options: sacct.SacctOptions | None = None) -> tuple[RecordBatch, ReadTotals]:
    reading = sacct.read_sacct(path, options)
    return read_whole(reading), reading.totals


@pytest.mark.parametrize(
    ("name", "jobs", "skipped"),
    [
        ("sample-sacct-output.txt", 0, {STEP: 68}),
        ("sample-sacct-running-output.txt", 0, {STEP: 10}),
        ("sample-sacct-output-invalid-utf8.txt", 2, {STEP: 9}),
        ("sample-sacct-output-midnight-edge-case.txt", 306, {STEP: 880}),
        ("sample-sacct-fake-line-break.txt", 2, {STEP: 2}),
        ("sample-sacct-multiple-multiline.txt", 4, {STEP: 2}),
        ("clockwork_sacct_1_v0.0.37.json", 2, {}),
        ("sarc_mila_1714003200.json", 8, {STEP: 16}),
        (
            "sarc_raisin_1716595200.json",
            4,
            {STEP: 8, "job that has not been allocated any node": 1},
        ),
    ],
)
def test_every_row_is_where_it_belongs(
    dumps: Path, name: str, jobs: int, skipped: dict[str, int]
) -> None:
    part, totals = read(dumps / name)
    assert not part.rejects
    assert (totals.records["jobs"], totals.skipped) == (jobs, skipped)
    assert totals.rows == jobs + sum(skipped.values())


def test_states_of_a_day(dumps: Path) -> None:
    part, totals = read(dumps / "sample-sacct-output-midnight-edge-case.txt")
    assert Counter(part.tables["jobs"]["state"]) == {
        "FAILED": 259, "CANCELLED": 24, "COMPLETED": 18, "REQUEUED": 2, "OUT_OF_MEMORY": 2,
        "TIMEOUT": 1,
    }  # fmt: skip
    assert any("NodeList" in note for note in totals.notes)


def test_fields_with_line_breaks(dumps: Path) -> None:
    part, totals = read(dumps / "sample-sacct-multiple-multiline.txt")
    rows = (
        part.tables["jobs"].select("job", "state", "attempt", "nodes", "gpus", "exit_code").rows()
    )
    assert rows == [
        ("201729", "FAILED", 0, 128, 1024, 6),
        *(("201844", "REQUEUED", attempt, 32, 256, 0) for attempt in range(3)),
    ]
    assert totals.odd == {"records put together from several lines": 3}
    for text, nodes in part.tables["jobs"].select("hosts", "nodes").iter_rows():
        assert host_lists.count(text) == nodes


def test_bytes_that_are_no_utf8(dumps: Path) -> None:
    part, totals = read(dumps / "sample-sacct-output-invalid-utf8.txt")
    rows = part.tables["jobs"].select("job", "state", "signal", "gpus", "hosts").rows()
    assert rows == [
        ("3557891", "FAILED", 9, 8, "learnnode047"), ("3557892", "TIMEOUT", 0, 1, "learnnode036"),
    ]  # fmt: skip
    assert totals.odd == {"bytes that are no UTF-8: replaced": 1}


def test_running_jobs_end_at_the_time_of_the_dump(dumps: Path) -> None:
    """The names of these dumps say when they were taken."""
    part, _ = read(dumps / "sarc_mila_1714003200.json")
    jobs = part.tables["jobs"]
    running = jobs.filter(jobs["state"] == "RUNNING")
    assert running["job"].to_list() == ["12", "18", "19"]
    assert set(running["t_ns"]) == {1714003200 * 10**9}
    assert jobs["gpus"].to_list() == [1, 1, 2, 0, 0, 1, 1, 0]
    assert jobs.filter(jobs["state"] == "FAILED")["failed_node"].to_list() == ["cn-r010"]


def test_an_old_log_without_header(dumps: Path) -> None:
    """Of its seven rows one is a task of an array; the others say ranges, and nodes for each."""
    columns = tuple(XDMOD.split())
    part, totals = read(dumps / "xdmod_job_arrays.log", sacct.SacctOptions(columns=columns))
    assert part.tables["jobs"].select("job", "state", "nodes").rows() == [
        ("4103947_100", "TIMEOUT", 32)
    ]
    assert host_lists.count(part.tables["jobs"]["hosts"].item()) == 32
    assert (totals.rows, totals.rejects.total()) == (6, 5)


@pytest.mark.parametrize("name", ["scontrol-show-config", "sinfo", "squeue"])
def test_other_commands_of_slurm_are_refused(dumps: Path, name: str) -> None:
    with pytest.raises(SourceError, match="no header of sacct"):
        sacct.read_sacct(dumps / f"sample-{name}-output.txt")
