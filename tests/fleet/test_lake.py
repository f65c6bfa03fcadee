"""Lake: atomic writes, no duplicates, and reads limited to a window."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import LakeError, StorageError, UsageError
from outlast.fleet.lake import MANIFEST, VERSION, Lake, read_manifest
from outlast.fleet.lake_writer import (
    READING,
    AddedRecords,
    DoubleBooking,
    LakeWriter,
    open_writer,
)
from outlast.fleet.record_tables import DAY_NS, KIND_OF, NAMES, schema, table
from outlast.log_records import CheckAdded, Finding, JobEnded, JobState, NodeSeen, Outage, Record

DAY = 19_860 * DAY_NS
HOUR = DAY_NS // 24


def job(
    name: str = "1", *, ended: int, start: int | None = 0, state: JobState = "COMPLETED",
    cluster: str = "c",
) -> JobEnded:  # fmt: skip
    return JobEnded(
        t_ns=DAY + ended, cluster=cluster, job=name, attempt=0, name="train", user="u",
        account="a", partition="p", qos="q", state=state, exit_code=0, signal=0, submit_ns=DAY,
        eligible_ns=DAY, start_ns=None if start is None else DAY + start, nodes=1, gpus=8,
        hosts="n1", excluded="", failed_node="", priority=0, restarts=0,
    )  # fmt: skip


def finding(t_ns: int, node: str = "n1") -> Finding:
    return Finding(
        t_ns=DAY + t_ns, cluster="c", node=node, check="xid", symptom="gpu-memory",
        severity="now", code="XID 48", device="", detail="",
    )  # fmt: skip


def outage(since: int, until: int | None, node: str = "n1") -> Outage:
    return Outage(
        t_ns=DAY + since, cluster="c", node=node, until_ns=None if until is None else DAY + until,
        symptom="other", detail="",
    )  # fmt: skip


def add(writer: LakeWriter, *records: Record) -> None:
    for kind, name in NAMES.items():
        found = [one for one in records if type(one) is kind]
        if found:
            writer.add(name, table(kind, found))


def put(path: Path, *records: Record) -> dict[str, AddedRecords]:
    with open_writer(path) as writer:
        add(writer, *records)
        return {**writer.commit([], "")}


def jobs(path: Path) -> list[tuple[str, str, int]]:
    found = Lake.open(path).tables().jobs.sort("job", "start_ns").collect()
    return list(found.select("job", pl.col("state").cast(str), "attempt").iter_rows())


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    lake = tmp_path / "new" / "lake"
    records = [job(ended=HOUR), finding(DAY_NS), outage(5, None)]
    put(lake, *records)
    tables = Lake.open(lake).tables()
    for kind, name in NAMES.items():
        expected = table(kind, [one for one in records if type(one) is kind])
        assert getattr(tables, name).collect().equals(expected)
    assert (tables.since_ns, tables.until_ns) == (DAY + 5, DAY + DAY_NS + 1)
    assert len(list(lake.glob("jobs/day=2024-05-17/*.parquet"))) == 1
    assert len(list(lake.glob("findings/day=2024-05-18/*.parquet"))) == 1


def test_kinds_without_records_have_their_columns(tmp_path: Path) -> None:
    put(tmp_path / "lake", finding(0))
    tables = Lake.open(tmp_path / "lake").tables()
    for name, kind in KIND_OF.items():
        assert getattr(tables, name).collect_schema() == schema(kind)


def test_a_job_that_ran_is_replaced_by_its_end(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put(lake, job("1", ended=HOUR, state="RUNNING"), job("2", ended=HOUR, state="RUNNING"))
    added = put(lake, job("1", ended=3 * DAY_NS, state="NODE_FAIL"))
    assert added["jobs"] == AddedRecords(records=1, again=0, replaced=1)
    assert jobs(lake) == [("1", "NODE_FAIL", 0), ("2", "RUNNING", 0)]


def test_an_older_reading_does_not_bring_it_back(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put(lake, job("1", ended=3 * DAY_NS, state="FAILED"))
    assert put(lake, job("1", ended=HOUR, state="RUNNING"))["jobs"].again == 1
    assert jobs(lake) == [("1", "FAILED", 0)]
    assert not list(lake.glob("jobs/day=2024-05-17/*"))


def test_of_two_that_ran_the_later_one_is_kept(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put(lake, job(ended=HOUR, state="RUNNING"))
    put(lake, job(ended=2 * DAY_NS, state="RUNNING"), job(ended=DAY_NS, state="RUNNING"))
    assert Lake.open(lake).tables().jobs.collect()["t_ns"].to_list() == [DAY + 2 * DAY_NS]


def test_attempts_of_a_job_are_all_there_and_counted_over_readings(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put(lake, job(start=0, ended=HOUR, state="NODE_FAIL"))
    put(lake, job(start=2 * HOUR, ended=DAY_NS), job(cluster="d", start=1, ended=HOUR))
    assert sorted(jobs(lake)) == [
        ("1", "COMPLETED", 0),
        ("1", "COMPLETED", 1),
        ("1", "NODE_FAIL", 0),
    ]


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    records = [job(ended=HOUR), job("2", start=None, ended=1), finding(3), finding(4, "n2")]
    put(lake, *records, *records)
    before = [frame.collect() for frame in Lake.open(lake).tables()[:6]]
    added = put(lake, *records)
    assert {name: one.again for name, one in added.items()} == {"jobs": 2, "findings": 2}
    after = [frame.collect() for frame in Lake.open(lake).tables()[:6]]
    assert all(one.equals(other) for one, other in zip(before, after, strict=True))


def test_an_outage_that_has_ended_is_known_better(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    put(lake, outage(0, None))
    assert put(lake, outage(0, HOUR))["outages"].replaced == 1
    assert put(lake, outage(0, None))["outages"].again == 1
    assert Lake.open(lake).tables().outages.collect()["until_ns"].to_list() == [DAY + HOUR]


def test_a_window_has_what_belongs_to_it(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    node = NodeSeen(t_ns=DAY, cluster="c", node="n1", kind="", gpus=8, rack="", pod="")
    check = CheckAdded(t_ns=DAY + 5 * DAY_NS, cluster="c", check="xid", symptom="other")
    put(
        lake, *(job(str(day), ended=day * DAY_NS) for day in range(6)), node, check,
        outage(0, 2 * DAY_NS), outage(1, None, "n2"), outage(2, HOUR, "n3"),
    )  # fmt: skip
    tables = Lake.open(lake).tables(DAY + DAY_NS, DAY + 3 * DAY_NS)
    assert tables.jobs.collect()["job"].to_list() == ["1", "2"]
    assert tables.outages.collect()["node"].to_list() == ["n1", "n2"]
    assert tables.nodes.collect().height == 1
    assert tables.checks.collect().height == 0


@pytest.mark.parametrize("window", [(DAY + 1, DAY + 1), (DAY + 9 * DAY_NS, None), (None, DAY - 9)])
def test_a_window_without_records_is_refused(
    tmp_path: Path, window: tuple[int | None, int | None]
) -> None:
    put(tmp_path, finding(0))
    with pytest.raises(LakeError, match=r"an empty period|has nothing from"):
        Lake.open(tmp_path).tables(*window)


def test_a_directory_without_a_lake_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="is no lake"):
        Lake.open(tmp_path)
    with pytest.raises(LakeError, match="is no lake"):
        Lake.open(tmp_path / "missing")
    with open_writer(tmp_path / "empty") as writer:
        writer.commit([], "")
    with pytest.raises(LakeError, match="no records yet"):
        Lake.open(tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"version": %d, "what": 1}' % (VERSION + 1), "is a lake of version"),
        (b"{", "damaged"),
        (b'{"version": 1, "parts": [{"kind": "jobs", "day": "../../..", "id": "x"}]}', "damaged"),
    ],
)
def test_an_unreadable_manifest_is_an_error(tmp_path: Path, content: bytes, words: str) -> None:
    put(tmp_path, finding(0))
    (tmp_path / MANIFEST).write_bytes(content)
    before = files(tmp_path)
    with pytest.raises(LakeError, match=words):
        Lake.open(tmp_path)
    with pytest.raises(LakeError, match=words):
        put(tmp_path, finding(1))
    assert files(tmp_path) == before


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    put(tmp_path, finding(0))
    (file,) = tmp_path.rglob("*.parquet")
    file.unlink()
    with pytest.raises(LakeError, match=file.name):
        Lake.open(tmp_path)


def test_a_reading_that_is_cut_off_leaves_the_lake_as_it_was(tmp_path: Path) -> None:
    put(tmp_path, job(ended=HOUR, state="RUNNING"))
    before = files(tmp_path)
    with contextlib.suppress(KeyboardInterrupt), open_writer(tmp_path) as writer:
        add(writer, job(ended=DAY_NS), finding(0))
        raise KeyboardInterrupt
    assert files(tmp_path) == before


def test_leftovers_of_a_killed_writer_are_not_read_and_go(tmp_path: Path) -> None:
    """Killed at the last moment: all files are in place, but lake.json does not name them."""
    put(tmp_path, job(ended=HOUR, state="RUNNING"))
    before, manifest = files(tmp_path), (tmp_path / MANIFEST).read_bytes()
    put(tmp_path, job(ended=DAY_NS), finding(0))
    for name, content in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / MANIFEST).write_bytes(manifest)
    (tmp_path / READING).mkdir()
    (tmp_path / READING / "jobs-1.arrow").write_bytes(b"half")
    assert jobs(tmp_path) == [("1", "RUNNING", 0)]
    with open_writer(tmp_path):
        pass
    assert files(tmp_path) == before


def test_a_killed_writer_of_a_new_lake_is_no_obstacle(tmp_path: Path) -> None:
    put(tmp_path, finding(0))
    (tmp_path / MANIFEST).unlink()
    put(tmp_path, finding(1))
    assert Lake.open(tmp_path).tables().findings.collect()["t_ns"].to_list() == [DAY + 1]


def test_a_new_lake_without_commit_is_removed(tmp_path: Path) -> None:
    with open_writer(tmp_path / "lake") as writer:
        add(writer, finding(0))
    assert not (tmp_path / "lake").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"no lake and not empty .it has thesis\.txt"):
        put(tmp_path, finding(0))
    assert files(tmp_path) == {"thesis.txt": b"precious"}
    with pytest.raises(UsageError, match="is a file, and a lake is a directory"):
        put(tmp_path / "thesis.txt", finding(0))
    with pytest.raises(StorageError, match="cannot be written"):
        put(tmp_path / "thesis.txt" / "lake", finding(0))


def test_a_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with open_writer(tmp_path) as first:
        add(first, finding(0))
        with (
            pytest.raises(LakeError, match=rf"another .* .pid {os.getpid()}"),
            open_writer(tmp_path, wait_s=0.0),
        ):
            pass
        first.commit([], "")
    put(tmp_path, finding(1))
    assert Lake.open(tmp_path).tables().findings.collect().height == 2


def test_a_stale_lock_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("999999\n")
    put(tmp_path, finding(0))
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_lake_json_names_what_is_there(tmp_path: Path) -> None:
    put(tmp_path, finding(0), finding(DAY_NS))
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert [(part.file in files(tmp_path), part.rows) for part in manifest.parts] == [(True, 1)] * 2
    raw = msgspec.json.decode((tmp_path / MANIFEST).read_bytes())
    assert raw["version"] == VERSION


def test_a_node_in_two_places_is_found(tmp_path: Path) -> None:
    whole = job("1", start=0, ended=4 * HOUR)
    after = job("2", start=4 * HOUR, ended=6 * HOUR)
    beside = msgspec.structs.replace(job("3", start=5 * HOUR, ended=7 * HOUR), gpus=2)
    elsewhere = job("4", start=0, ended=4 * HOUR, cluster="d")
    with open_writer(tmp_path) as writer:
        add(writer, whole, after, elsewhere)
        writer.commit([], "")
        assert writer.doubles == []
    with open_writer(tmp_path) as writer:
        add(writer, beside)
        writer.commit([], "")
        assert writer.doubles == [DoubleBooking("c", "n1", DAY + 5 * HOUR, 10, 8)]


def test_a_node_in_two_places_is_found_over_midnights(tmp_path: Path) -> None:
    """Jobs of days, which end on different ones, also where they were read in two goes."""
    long, later = job("1", start=0, ended=30 * HOUR), job("2", start=26 * HOUR, ended=80 * HOUR)
    fine = job("3", start=400 * HOUR, ended=410 * HOUR)
    found = [DoubleBooking("c", "n1", DAY + 26 * HOUR, 16, 8)]
    with open_writer(tmp_path / "one") as writer:
        add(writer, long, later, fine)
        writer.commit([], "")
        assert writer.doubles == found
    for place, jobs in enumerate([[long], [later], [fine]]):
        with open_writer(tmp_path / "three") as writer:
            add(writer, *jobs)
            writer.commit([], "")
            assert writer.doubles == (found if place == 1 else [])


STATES: st.SearchStrategy[JobState] = st.sampled_from(["RUNNING", "COMPLETED", "NODE_FAIL"])
ATTEMPTS = st.lists(
    st.builds(
        lambda name, start, lasted, state: job(
            str(name), start=start * HOUR, ended=(start + lasted) * HOUR, state=state
        ),
        st.integers(1, 3), st.integers(0, 2), st.integers(0, 60), STATES,
    ),
    max_size=8,
)  # fmt: skip


@settings(max_examples=10)
@given(ATTEMPTS, ATTEMPTS)
def test_every_attempt_is_known_as_well_as_any_reading_knew_it(
    tmp_path_factory: pytest.TempPathFactory, first: list[JobEnded], second: list[JobEnded]
) -> None:
    lake = tmp_path_factory.mktemp("lake")
    put(lake, finding(0), *first)
    put(lake, *second)
    kept = Lake.open(lake).tables().jobs.collect()
    known: dict[tuple[str, int | None], list[JobEnded]] = {}
    for one in (*first, *second):
        known.setdefault((one.job, one.start_ns), []).append(one)
    found = {}
    for row in kept.iter_rows(named=True):
        found.setdefault((row["job"], row["start_ns"]), []).append(row)
    assert found.keys() == known.keys()
    for key, rows in found.items():
        running = [row["t_ns"] for row in rows if row["state"] == "RUNNING"]
        ended = [one for one in known[key] if one.state != "RUNNING"]
        if ended:
            assert not running
            assert {row["t_ns"] // DAY_NS for row in rows} == {one.t_ns // DAY_NS for one in ended}
        else:
            assert running == [max(one.t_ns for one in known[key])]
