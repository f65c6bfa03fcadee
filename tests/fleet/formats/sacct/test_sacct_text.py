"""sacct text: the record of each row."""

from pathlib import Path

import pytest
from tests.fleet.sacct_log import HEADER, ROW, TEN_S, jobs, read, row


def test_a_row_becomes_a_record(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, ROW, cluster="rsc")
    assert job | {"attempt": 0} == {
        "t_ns": (TEN_S + 3610) * 10**9, "cluster": "rsc", "job": "7", "attempt": 0, "name": "train",
        "user": "", "account": "", "partition": "", "qos": "", "state": "COMPLETED",
        "exit_code": 0, "signal": 0, "submit_ns": TEN_S * 10**9, "eligible_ns": None,
        "start_ns": (TEN_S + 10) * 10**9, "nodes": 2, "gpus": 16, "hosts": "n[1-2]",
        "excluded": "", "failed_node": "", "priority": 0, "restarts": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1185300516", "CANCELLED"), ("CANCELLED+", "CANCELLED"),
        ("NODE_FAIL", "NODE_FAIL"),
        ("OUT_OF_ME+", "OUT_OF_MEMORY"), ("completed", "COMPLETED"), ("TO", "TIMEOUT"),
        ("RESIZING", "REQUEUED"), ("LAUNCH_FAILED", "BOOT_FAIL"),
    ],
)  # fmt: skip
def test_states(tmp_path: Path, text: str, state: str) -> None:
    assert jobs(tmp_path, row(state=text))[0]["state"] == state


@pytest.mark.parametrize("text", ["", "R+", "RE+", "DONE", "COMPLETE", "+"])
def test_a_state_that_is_none_is_rejected(tmp_path: Path, text: str) -> None:
    part, _ = read(tmp_path, f"{HEADER}\n{row(state=text)}\n{ROW}\n")
    assert [(one.line, one.reason) for one in part.rejects] == [(2, "no job state that Slurm has")]
    assert part.rejects[0].text == row(state=text)
    assert part.tables["jobs"].height == 1


def test_steps_pending_jobs_and_headers_are_skipped_and_counted(tmp_path: Path) -> None:
    never = {"start": "Unknown", "end": "Unknown", "nodelist": "None assigned", "alloctres": ""}
    rows = [
        row(jobid="7.batch"), row(jobid="7.extern"), row(jobid="8_2.0"), row(jobid="9+1.0"), HEADER,
        row(jobid="10_[1-3,9%2]", state="PENDING", **never),
        row(jobid="11", state="PENDING", **never), row(jobid="13_7"), row(jobid="14+1"),
        row(jobid="12_[4-5]", state="CANCELLED by 5", **never),
    ]  # fmt: skip
    part, totals = read(tmp_path, "\n".join([HEADER, *rows]))
    assert part.tables["jobs"]["job"].to_list() == ["13_7", "14+1"]
    assert totals.skipped == {
        "step of a job": 4, "header again": 1, "job that has not been allocated any node": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tres", "gpus"),
    [
        ("cpu=12,gres/gpu=2,gres/gpu:a100=2", 2),
        ("gres/gpu:a100=2,gres/gpu:h100=4", 6),
        ("gres/gpu=2K", 2048),
        ("billing=1,cpu=1,gres/gpumem=80G", 0),
        ("", 0),
    ],
)
def test_gpus_are_counted_once(tmp_path: Path, tres: str, gpus: int) -> None:
    assert jobs(tmp_path, row(alloctres=tres))[0]["gpus"] == gpus


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", 8),
        ("gpu:a100:4(IDX:0-3),craynetwork:1", 4),
        ("gres:gpu:2", 2),
        ("gpu", 1),
        ("", 0),
    ],
)
def test_old_gres(tmp_path: Path, gres: str, gpus: int) -> None:
    header, old = HEADER.replace("AllocTRES", "AllocGRES"), row(alloctres=gres)
    part, _ = read(tmp_path, f"{header}\n{old}\n")
    assert part.tables["jobs"]["gpus"].item() == gpus
    # what was asked for is of each node
    part, totals = read(tmp_path, f"{header.replace('AllocG', 'ReqG')}\n{old}\n")
    assert part.tables["jobs"]["gpus"].item() == 2 * gpus
    assert any("taken as those that it requested" in note for note in totals.notes)


def test_mig_slices_are_reported(tmp_path: Path) -> None:
    """Seven slices of one card are seven GPUs in accounting, and nothing said so."""
    sliced = row(nnodes="1", nodelist="n1", alloctres="gres/gpu:a100_1g.5gb=7,gres/gpu=7")
    part, totals = read(tmp_path, "\n".join([HEADER, sliced, row(jobid="8"), ""]))
    assert sorted(part.tables["jobs"]["gpus"]) == [7, 16]
    assert [count for what, count in totals.odd.items() if "MIG" in what] == [1]


def test_a_job_that_was_cancelled_in_the_queue_held_nothing(tmp_path: Path) -> None:
    at = "2024-05-17T10:00:10"
    (job,) = jobs(
        tmp_path,
        row(state="CANCELLED by 7", start=at, end=at, elapsedraw="0", nodelist="None assigned",
            alloctres=""),
    )  # fmt: skip
    assert (job["start_ns"], job["nodes"], job["gpus"]) == (None, 0, 0)
    assert job["t_ns"] == (TEN_S + 10) * 10**9


def test_running_jobs_run_until_the_log_ends(tmp_path: Path) -> None:
    running = row(jobid="8", state="RUNNING", end="Unknown", elapsedraw="500")
    unsaid = row(jobid="9", state="SUSPENDED", end="Unknown", elapsedraw="")
    found = {
        job["job"]: job["t_ns"] // 10**9 - TEN_S for job in jobs(tmp_path, unsaid, running, ROW)
    }
    assert found == {"7": 3610, "8": 510, "9": 3610}
    taken = jobs(tmp_path, unsaid, taken_ns=(TEN_S + 9000) * 10**9)
    assert taken[0]["t_ns"] == (TEN_S + 9000) * 10**9


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"end": "2024-05-17T09:00:00"}, "ends before it starts"),
        ({"end": "Unknown", "elapsedraw": ""}, "no end, and no elapsed time"),
        ({"start": "yesterday"}, "a time that cannot be read"),
        ({"jobid": "train"}, "no job id"),
        ({"jobid": ""}, "no job id"),
        ({"jobid": "-7"}, "no job id"),
        ({"state": "RUNNING", "start": "Unknown"}, "runs and did not start"),
        ({"jobid": "7_[1-3]"}, "range of array tasks"),
    ],
)
def test_impossible_rows_are_rejected_with_their_reason(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    part, totals = read(tmp_path, "\n".join([HEADER, ROW, row(**changes), row(jobid="9")]))
    (one,) = part.rejects
    assert (one.line, one.text) == (3, row(**changes))
    assert reason in one.reason
    assert totals.rejects[one.reason] == 1
    assert part.tables["jobs"]["job"].to_list() == ["7", "9"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"submit": "2024-05-17T10:00:11"}, "started before it was submitted"),
        ({"elapsedraw": "-5"}, "negative elapsed"),
        ({"elapsedraw": "1200"}, "differs from elapsed: "),
        ({"elapsedraw": "7200"}, "differs from elapsed by an hour"),
        ({"nodelist": "n[1-"}, "malformed list of nodes"),
        ({"nodelist": "n[3-1]"}, "malformed list of nodes"),
        ({"nodelist": "n[0-99999999]"}, "malformed list of nodes"),
        ({"nodelist": ""}, "does not name"),
        ({"nodelist": "n[1-3]", "nnodes": "99999"}, "not how many its list names"),
        ({"alloctres": "gres/gpu=many"}, "GPUs that is none"),
        ({"submit": "1970-01-01T00:00:00"}, "before 2000"),
    ],
)
def test_oddities_are_kept_and_counted(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    part, totals = read(tmp_path, "\n".join([HEADER, row(**changes), ROW]))
    assert part.tables["jobs"].height == 2
    found = {what: count for what, count in totals.odd.items() if said in what}
    assert list(found.values()) == [1]


def test_an_end_follows_from_what_elapsed(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, row(state="NODE_FAIL", end="Unknown"))
    assert job["t_ns"] == (TEN_S + 3610) * 10**9
    text = "JobID|State|End|Elapsed\n1|FAILED|2024-05-17T10:00:00|1-02:00:00\n"
    text += "2|FAILED|2024-05-17T10:00:00|02:03:04\n3|FAILED|2024-05-17T10:00:00|01:02.500\n"
    part, _ = read(tmp_path, text)
    spans = [(job["t_ns"] - job["start_ns"]) // 10**9 for job in part.tables["jobs"].to_dicts()]
    assert spans == [26 * 3600, 7384, 62]


def test_times_with_a_zone_and_as_seconds(tmp_path: Path) -> None:
    rows = [
        row(jobid="1"),
        row(jobid="2", start="2024-05-17T12:00:10+02:00", end="2024-05-17T08:30:10-0230"),
        row(jobid="3", start=str(TEN_S + 10), end="2024-05-17T11:00:10Z"),
    ]
    part, totals = read(tmp_path, "\n".join([HEADER, *rows]))
    table = part.tables["jobs"]
    assert set(table["start_ns"]) == {(TEN_S + 10) * 10**9}
    assert set(table["t_ns"]) == {(TEN_S + 3610) * 10**9}
    assert "times are written as seconds and with a zone and without a zone" in totals.notes


def test_a_zone_with_its_doubled_and_its_missing_hour(tmp_path: Path) -> None:
    """Clocks in Berlin went from 3:00 back to 2:00 on 2024-10-27, from 2:00 to 3:00 on 03-31."""
    rows = [
        row(jobid="1", start="2024-10-27T01:30:00", end="2024-10-27T02:30:00", elapsedraw="7200"),
        row(jobid="2", start="2024-10-27T01:30:00", end="2024-10-27T02:30:00", elapsedraw="3600"),
        row(jobid="3", start="2024-10-27T02:30:00", end="2024-10-27T03:30:00", elapsedraw="3600"),
        row(jobid="4", start="2024-10-27T02:50:00", end="2024-10-27T02:10:00", elapsedraw=""),
        row(jobid="5", start="2024-03-31T02:30:00", end="2024-03-31T04:30:00"),
    ]
    part, totals = read(tmp_path, "\n".join([HEADER, *rows]), zone="Europe/Berlin")
    spans = {
        job["job"]: (job["t_ns"] - job["start_ns"]) // 10**9
        for job in part.tables["jobs"].to_dicts()
    }
    assert spans == {"1": 7200, "2": 3600, "3": 3600, "4": 1200}
    assert [count for what, count in totals.odd.items() if "twice" in what] == [4]
    (one,) = part.rejects
    assert one.line == 6
    assert "leaves out" in one.reason


def test_attempts_are_counted_by_start(tmp_path: Path) -> None:
    rows = [
        row(jobid="7", start="2024-05-17T10:30:00"), row(jobid="8"),
        row(jobid="7", state="NODE_FAIL", end="2024-05-17T10:20:00"),
    ]  # fmt: skip
    found = [(job["job"], job["state"], job["attempt"]) for job in jobs(tmp_path, *rows)]
    assert found == [("7", "COMPLETED", 1), ("8", "COMPLETED", 0), ("7", "NODE_FAIL", 0)]


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("sbatch --exclude=n[1-2],n7 run.sh", "n[1-2],n7"),
        ("sbatch -N 4 -x n1 run.sh", "n1"),
        ("srun -xn1 --pty bash", "n1"),
        ("sbatch --exclusive --exclude n3 run.sh -x n9", "n3"),
        ("sbatch run.sh -x n9", ""),
        ("sbatch --exclude=./bad_nodes run.sh", ""),
        ("sbatch --exclusive run.sh", ""),
        ("", ""),
    ],
)
def test_excluded_nodes_are_those_of_slurm_and_not_of_the_script(
    tmp_path: Path, line: str, hosts: str
) -> None:
    part, _ = read(tmp_path, f"{HEADER}|SubmitLine\n{ROW}|{line}\n{ROW}|\n")
    assert part.tables["jobs"]["excluded"].to_list() == [hosts, ""]


def test_restarts_without_earlier_records_are_counted_as_hidden(tmp_path: Path) -> None:
    header = f"{HEADER}|Restarts"
    _, totals = read(tmp_path, f"{header}\n{ROW}|2\n{row(jobid='8')}|0\n")
    assert "sacct ran without --duplicates: 2 earlier attempts" in totals.notes[-1]
    shown = [
        f"{row(state=state)}|{n}" for n, state in enumerate(["NODE_FAIL", "REQUEUED", "FAILED"])
    ]
    _, totals = read(tmp_path, "\n".join([header, *shown]))
    assert not any("earlier attempts" in note for note in totals.notes)


def test_many_jobs_with_one_record_each_look_like_no_duplicates(tmp_path: Path) -> None:
    rows = [row(jobid=str(number)) for number in range(1000)]
    _, totals = read(tmp_path, "\n".join([HEADER, *rows]))
    assert "none of 1,000 jobs has two records" in totals.notes[-1]
    _, totals = read(tmp_path, "\n".join([HEADER, *rows, row(jobid="5", state="REQUEUED")]))
    assert not any("two records" in note for note in totals.notes)


def test_missing_columns_are_reported_with_their_effect(tmp_path: Path) -> None:
    _, totals = read(tmp_path, f"{HEADER}\n{ROW}\n")
    (note,) = totals.notes
    assert note.startswith("no column says ") and "; which node failed (FailedNode); " in note
    _, totals = read(tmp_path, "State|JobID|End|Start\nFAILED|1|None|2024-05-17T10:00:00\n")
    assert any("no figure of a node is possible" in note for note in totals.notes)
    assert any("how many GPUs" in note for note in totals.notes)


def test_nodes_that_are_named_count_and_not_an_absurd_number(tmp_path: Path) -> None:
    """One such row made r_f a thousandth of what it was."""
    found = jobs(tmp_path, row(nodelist="n[1-3]", nnodes="99999"), row(nodelist="", nnodes="5"))
    assert [one["nodes"] for one in found] == [3, 5]


@pytest.mark.parametrize("where", ["between", "first", "last", "torn before"])
def test_one_endless_line_is_a_reject_and_no_end_of_the_file(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of 60 MB refused a file of a million good ones."""
    from outlast.fleet.formats.sacct import sacct_text

    monkeypatch.setattr(sacct_text, "RECORD_BYTES_MAX", 1 << 16)
    good = [row(jobid=str(n)) for n in range(40)]
    at = {"between": 20, "first": 0, "last": 40, "torn before": 20}[where]
    long = ["x" * (1 << 20)]
    torn = ["half a record"] if where == "torn before" else []
    text = "\n".join([HEADER, *good[:at], *torn, *long, *good[at:], ""])
    part, totals = read(tmp_path, text, block_bytes=1 << 14)
    assert sorted(map(int, part.tables["jobs"]["job"])) == list(range(40))
    reasons = [one.reason for one in part.rejects]
    assert any("which no record has" in reason for reason in reasons)
    assert totals.rows == 41 + len(torn)
    assert part.rejects[-1].line == at + 2 + len(torn) or torn
