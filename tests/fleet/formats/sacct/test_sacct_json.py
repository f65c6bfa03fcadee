"""`sacct --json` of Slurm 21.08 and later."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.whole_log import read_whole

from outlast.errors import SourceError
from outlast.fleet.formats import sacct
from outlast.fleet.formats.log_reading import ReadTotals, RecordBatch

OLD: dict[str, Any] = {
    "job_id": 10, "array": {"job_id": 1, "task": None, "task_id": 7}, "cluster": "cedar",
    "het": {"job_id": 0, "job_offset": None}, "name": "train", "user": "u", "account": "a",
    "partition": "p", "qos": "normal", "nodes": "cdr[1-2]", "allocation_nodes": 2,
    "priority": 1328907, "exit_code": {"status": "SIGNALED", "return_code": 0,
                                       "signal": {"signal_id": 9, "name": "KILL"}},
    "state": {"current": "NODE_FAIL", "reason": "Prolog"}, "steps": [{"nodes": "cdr1"}],
    "time": {"elapsed": 20, "eligible": 1680193504, "end": 0, "start": 1680193504,
             "submission": 1680193479},
    "tres": {"allocated": [{"type": "gres", "name": "gpu", "id": 1001, "count": 2},
                           {"type": "gres", "name": "gpu:a100", "id": 1002, "count": 2},
                           {"type": "cpu", "name": None, "id": 1, "count": 4}]},
}  # fmt: skip
SET = {"set": True, "infinite": False}
UNSET = {"set": False, "infinite": False, "number": 0}
NEW: dict[str, Any] = OLD | {
    "job_id": 12, "array": {"job_id": 0, "task_id": UNSET, "task": ""},
    "het": {"job_id": 0, "job_offset": UNSET}, "priority": SET | {"number": 5},
    "state": {"current": ["FAILED", "REQUEUED"], "reason": "None"}, "failed_node": "cdr2",
    "exit_code": {"status": ["FAILED"], "return_code": SET | {"number": 1},
                  "signal": {"id": UNSET, "name": ""}},
    "restart_cnt": 0, "submit_line": "sbatch -x cdr7 run.sh",
    "time": {"elapsed": 10, "eligible": 1680193504, "end": SET | {"number": 1680193514},
             "start": 1680193504, "submission": 1680193479},
}  # fmt: skip


def read(folder: Path, document: object) -> tuple[RecordBatch, ReadTotals]:
    path = folder / "sacct.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    reading = sacct.read_sacct(path)
    return read_whole(reading), reading.totals


def changed(job: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(job) | changes


def test_plain_numbers(tmp_path: Path) -> None:
    part, totals = read(tmp_path, {"meta": {}, "errors": [], "jobs": [OLD]})
    (job,) = part.tables["jobs"].to_dicts()
    assert (job["job"], job["state"], job["exit_code"], job["signal"]) == ("1_7", "NODE_FAIL", 0, 9)
    assert (job["nodes"], job["gpus"], job["hosts"]) == (2, 2, "cdr[1-2]")
    assert job["t_ns"] == (1680193504 + 20) * 10**9  # it has no end of its own
    assert totals.rows == 2
    assert totals.skipped == {"step of a job": 1}


def test_numbers_with_a_set_flag(tmp_path: Path) -> None:
    part, _ = read(tmp_path, {"jobs": [NEW], "meta": {}, "errors": [], "warnings": []})
    (job,) = part.tables["jobs"].to_dicts()
    assert (job["job"], job["state"], job["exit_code"], job["signal"]) == ("12", "FAILED", 1, 0)
    assert (job["priority"], job["failed_node"], job["excluded"]) == (5, "cdr2", "cdr7")
    assert job["t_ns"] == 1680193514 * 10**9


def test_arrays_parts_and_jobs_that_wait(tmp_path: Path) -> None:
    none = 4294967294
    jobs = [
        changed(NEW, het={"job_id": 40, "job_offset": SET | {"number": 1}}),
        changed(OLD, array={"job_id": 0, "task_id": none, "task": None}),
        changed(NEW, array={"job_id": 50, "task_id": UNSET, "task": "1-3"},
                state={"current": ["PENDING"]}, time=NEW["time"] | {"start": 0, "end": 0}),
        changed(NEW, state={"current": ["COMPLETING", "CANCELLED"]},
                restart_cnt=SET | {"number": 3}),
    ]  # fmt: skip
    part, totals = read(tmp_path, {"jobs": jobs})
    found = part.tables["jobs"].select("job", "state").rows()
    assert found == [("40+1", "FAILED"), ("10", "NODE_FAIL"), ("12", "CANCELLED")]
    assert totals.skipped["job that has not been allocated any node"] == 1
    assert "3 earlier attempts" in totals.notes[-1]


def test_a_job_of_another_shape_is_a_reject(tmp_path: Path) -> None:
    part, totals = read(tmp_path, {"jobs": [{"job_id": 3}, OLD, changed(OLD, state=7)]})
    assert [one.line for one in part.rejects] == [1, 3]
    assert "state" in part.rejects[0].text
    assert part.tables["jobs"].height == 1
    assert totals.rejects.total() == 2


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"pods": []}, "no output of sacct --json.*keys pods"),
        ([1, 2], "a list at its top"),
        ('{"jobs": [', "cut off"),
        ({"jobs": [{"job_id": 1, "job_state": ["RUNNING"]}]}, "is of squeue or scontrol"),
        ({"sinfo": []}, "is of sinfo"),
    ],
)
def test_other_json_is_refused_by_name(tmp_path: Path, document: object, match: str) -> None:
    with pytest.raises(SourceError, match=match):
        read(tmp_path, document)


def test_an_empty_job_list_is_reported(tmp_path: Path) -> None:
    part, totals = read(tmp_path, {"jobs": [], "errors": ["slurmdbd is down"]})
    assert part == RecordBatch({}, [])
    assert totals.notes[0] == "sacct found no jobs"
    assert "slurmdbd is down" in totals.quoted[0]
