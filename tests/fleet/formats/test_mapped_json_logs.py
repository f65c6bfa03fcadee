"""Mapped JSON logs: Kubernetes jobs, nested lists, dotted keys, relative times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fleet.formats.test_mapped_logs import TAKEN_NS, reading, seconds

from outlast.cli.main import main
from outlast.errors import UsageError
from outlast.fleet.formats.log_rows import find_json_value, parse_json_path
from outlast.fleet.lake import Lake

PODS = """
rows = "jobs"
[columns]
job = "metadata.name"
user = 'metadata.labels."team.example.org/owner"'
state = ["status.reason", "status.phase"]
submit = "metadata.creationTimestamp"
start = "status.startTime"
end = [
    "status.containerStatuses[0].state.terminated.finishedAt",
    "status.conditions[type=Ready,status=False].lastTransitionTime",
]
gpus = "spec.containers[*].resources.limits.nvidia.com/gpu"
hosts = "spec.nodeName"
"""


def _condition(kind: str, status: str, at: str) -> dict[str, str]:
    return {"type": kind, "status": status, "lastTransitionTime": f"2024-05-17T{at}Z"}


def _pod(name: str, phase: str, **status: object) -> dict[str, object]:
    limits = {"nvidia.com/gpu": "8", "memory": "1Ti"}
    began = {} if phase == "Pending" else {"startTime": "2024-05-17T10:00:00Z"}
    return {
        "metadata": {
            "name": name, "creationTimestamp": "2024-05-17T09:59:00Z",
            "labels": {"team.example.org/owner": "ann", "app": "x"},
        },
        "spec": {"nodeName": "gke-1", "containers": [{"resources": {"limits": limits}},
                                                     {"resources": {}}]},
        "status": {"phase": phase, **began, **status},
    }  # fmt: skip


ENDED = [{"state": {"terminated": {"exitCode": 0, "finishedAt": "2024-05-17T11:00:00Z"}}}]
LIST = {
    "apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""},
    "items": [
        _pod("a-0", "Succeeded", containerStatuses=ENDED),
        _pod("a-1", "Failed", reason="Evicted",
             conditions=[_condition("Initialized", "True", "10:00:01"),
                         _condition("Ready", "False", "10:30:00")]),
        _pod("a-2", "Running", containerStatuses=[{"state": {"running": {}}}]),
        _pod("a-3", "Pending"),
        _pod("a-4", "Failed", reason="NodeLost", containerStatuses=ENDED),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", ["indented", "one line", "a line each", "list", "pages"])
def test_pods_as_kubectl_writes_them(tmp_path: Path, form: str) -> None:
    """A list of items was one row without a name; a path could not enter a list."""
    items = LIST["items"]
    assert isinstance(items, list)
    text = {
        "indented": json.dumps(LIST, indent=4),
        "one line": json.dumps(LIST),
        "a line each": "\n".join(map(json.dumps, items)),
        "list": json.dumps(items),
        "pages": "\n".join(json.dumps({**LIST, "items": some}) for some in (items[:2], items[2:])),
    }[form]
    part, totals = reading(tmp_path, PODS, text)
    jobs = part.tables["jobs"]
    assert not part.rejects and totals.rows == 5
    assert totals.skipped == {"job that has not been allocated any node": 1}
    assert jobs["job"].to_list() == ["a-0", "a-1", "a-2", "a-4"]
    assert jobs["state"].to_list() == ["COMPLETED", "PREEMPTED", "RUNNING", "NODE_FAIL"]
    assert jobs["gpus"].to_list() == [8] * 4 and set(jobs["user"]) == {"ann"}
    ends = [1_715_943_600, 1_715_941_800, TAKEN_NS // 10**9, 1_715_943_600]
    assert seconds(jobs["t_ns"]) == ends


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a.b[1].c", 2), ("a.b.1.c", 2), ("a.b[*].c", [1, 2]), ("a.b[kind=x].c", 1),
        ('l."k.with/dots"', "y"), ("l.k.with/dots", "y"), ("a.b[9].c", None), ("a.c.d", None),
        ("a.b[kind=w,c=2].c", 2), ("a.b[kind=w,c=1].c", None),
        ("a.b[?(@.kind=='w' && @.c==2)].c", 2), ("plain.key", "z"),
        ("a.b[?(@.kind=='x')].c", 1), ("l.long.er.key", 5),
    ],
)  # fmt: skip
def test_paths(path: str, found: object) -> None:
    value = {
        "a": {"b": [{"c": 1, "kind": "x"}, {"c": 2, "kind": "w"}]}, "plain.key": "z",
        "l": {"k.with/dots": "y", "long.er": {"key": 5}},
    }  # fmt: skip
    assert find_json_value(value, path, parse_json_path(path)) == found


@pytest.mark.parametrize("path", ["a..b", "a[", "a]", 'a."b', "." * 50])
def test_invalid_paths_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match="is no path"):
        parse_json_path(path)


KUEUE = """
rows = "jobs"
[columns]
job = "name"
state = ["conditions[type=Finished].reason", "conditions[type=Evicted,status=True].reason"]
start = "conditions[type=Admitted].lastTransitionTime"
end = ["conditions[type=Finished].lastTransitionTime",
       "conditions[type=Evicted].lastTransitionTime"]
gpus = "gpus"
"""


def test_a_condition_that_is_not_true_is_no_time_of_its_own(tmp_path: Path) -> None:
    """An evicted workload of Kueue began when it was evicted, and so held nothing."""
    ended = [_condition("Admitted", "True", "10:00:00"), _condition("Finished", "True", "12:00:00")]
    ended[1]["reason"] = "Succeeded"
    evicted = [
        _condition("Admitted", "False", "12:00:00"),
        _condition("Evicted", "True", "12:00:00"),
    ]
    evicted[1]["reason"] = "Preempted"
    log = [{"name": "a", "conditions": ended, "gpus": 8}, {"name": "b", "conditions": evicted}]
    part, _ = reading(tmp_path, KUEUE, json.dumps(log))
    assert part.tables["jobs"]["job"].to_list() == ["a"]
    (one,) = part.rejects
    assert "[type=Ready,status=True]: start" in one.reason
    said = KUEUE.replace("[type=Admitted]", "[type=Admitted,status=True]")
    part, totals = reading(tmp_path, said, json.dumps(log))
    assert part.tables["jobs"]["start_ns"].null_count() == 1 and not part.rejects
    assert any("no number of GPUs" in odd for odd in totals.odd)


def test_running_jobs_with_an_end_are_counted(tmp_path: Path) -> None:
    log = [{"name": "a", "conditions": [_condition("Finished", "True", "12:00:00")]}]
    said = KUEUE.replace("state = [", 'state = ["state", ')
    text = json.dumps(
        [
            {
                **log[0],
                "state": "running",
                "conditions": [*log[0]["conditions"], _condition("Admitted", "True", "10:00:00")],
            }
        ]
    )
    _, totals = reading(tmp_path, said, text)
    assert any("run and say an end" in odd for odd in totals.odd)


def test_oddities_are_counted_for_accepted_rows_only(tmp_path: Path) -> None:
    said = 'rows = "jobs"\n[columns]\njob = "id"\nstate = "s"\nstart = "b"\nend = "e"\n'
    text = "id,s,b,e\n1,failed,2024-05-18,2024-05-17\n2,nothing,2024-05-18,2024-05-17\n"
    part, totals = reading(tmp_path, said, text)
    assert len(part.rejects) == 1
    assert list(totals.odd.values()) == [1] and "no `gpus`" in totals.notes[0]


def test_untranslated_values_are_reported(tmp_path: Path) -> None:
    """The start of a row of JSON does not show its state."""
    said = 'rows = "jobs"\n[columns]\njob = "id"\nstate = "state"\nend = "end"\n'
    log = [
        {"id": str(k), "state": one, "end": "2024-05-17"}
        for k, one in enumerate(("crashed", "failed"))
    ]
    _, totals = reading(tmp_path, said, json.dumps(log))
    assert totals.quoted == ["[values.state] lacks words of this log: 'crashed'"]


def test_a_list_under_a_name_of_its_own(tmp_path: Path) -> None:
    said = 'rows = "nodes"\nitems = "data.hosts"\n[columns]\ntime = "since"\nnode = "name"\n'
    log = {"data": {"hosts": [{"name": "n1", "since": "2024-05-17"}, "odd"]}}
    part, totals = reading(tmp_path, said, json.dumps(log, indent=1))
    assert part.tables["nodes"]["node"].to_list() == ["n1"] and totals.rows == 2
    assert [one.reason for one in part.rejects] == ["no JSON object"]


TRACE = """
rows = "jobs"
[columns]
job = "id"
state = "status"
submit = "submit"
start = "start"
end = "end"
gpus = "gpus"
[times]
epoch = "2020-03-01"
"""


def test_times_that_count_from_0(tmp_path: Path) -> None:
    """As in published traces: 0 is the first second, and no time that is not known."""
    text = "id,status,submit,start,end,gpus\n1,Pass,0,0,3600.5,8\n2,done,10,20,90,1\n3,DONE,5,,,0\n"
    said = TRACE + '[values.state]\nPass = "COMPLETED"\n'
    part, _ = reading(tmp_path, said, text)
    epoch = 1_583_020_800
    assert seconds(part.tables["jobs"]["start_ns"]) == [epoch, epoch + 20]
    assert part.tables["jobs"]["t_ns"][0] == (epoch + 3600) * 10**9 + 5 * 10**8
    assert [one.reason for one in part.rejects] == ["no end, nor a start and a duration"]


def test_times_before_2000_where_they_are_meant(tmp_path: Path) -> None:
    text = "id,status,start,end,gpus,submit\n1,DONE,1993-10-01,1993-10-02,0,1993-10-01\n"
    said = TRACE.replace('epoch = "2020-03-01"', "")
    part, _ = reading(tmp_path, said, text)
    assert "no time between 2000 and 2100" in part.rejects[0].reason
    part, _ = reading(tmp_path, said + 'earliest = "1990-01-01"\n', text)
    assert seconds(part.tables["jobs"]["start_ns"]) == [749_433_600]


@pytest.mark.parametrize("key", ["epoch", "earliest"])
@pytest.mark.parametrize("value", ["yesterday", "1850-01-01", ""])
def test_a_beginning_that_is_none(tmp_path: Path, key: str, value: str) -> None:
    said = TRACE.replace('epoch = "2020-03-01"', f'{key} = "{value}"')
    with pytest.raises(UsageError, match=key):
        reading(tmp_path, said, "id,status,submit,start,end,gpus\n")


def test_a_zero_is_no_time_where_nothing_counts_from_it(tmp_path: Path) -> None:
    said = TRACE.replace('epoch = "2020-03-01"', "")
    text = "id,status,submit,start,end,gpus\n1,CANCELLED,1715940000,0,1715940000,0\n"
    part, _ = reading(tmp_path, said, text)
    assert part.tables["jobs"]["start_ns"].to_list() == [None]


EVENTS = """Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User
alpha|n7|2024-05-17T10:00:00|Unknown|DOWN*|Not responding|slurm(64030)
alpha|n8|2024-05-17T10:00:00|2024-05-17T12:00:00|DRAIN|ticket 7|root(0)
alpha||2024-05-17T09:00:00|2024-05-17T10:00:00||Cluster Registered TRES|
alpha|n9|Unknown|Unknown|DOWN|odd|root(0)
"""


@pytest.mark.parametrize("trailing", ["", "|"])
def test_nodes_that_are_down_now_are_outages(
    tmp_path: Path, trailing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`sacctmgr show event`: TimeEnd=Unknown was no time, and the row was rejected."""
    log = tmp_path / "events.txt"
    log.write_text("".join(f"{line}{trailing}\n" for line in EVENTS.splitlines()))
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(log)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "event of the whole cluster" in out and "no time" in out
    found = Lake.open(tmp_path / "lake").tables().outages.sort("node").collect()
    assert found.select("cluster", "node", "detail").rows() == [
        ("alpha", "n7", "Not responding"), ("alpha", "n8", "ticket 7"),
    ]  # fmt: skip
    assert seconds(found["until_ns"]) == [None, 1_715_947_200]


def test_an_outage_that_ends_before_its_start_is_counted(tmp_path: Path) -> None:
    said = 'rows = "outages"\n[columns]\ntime = "a"\nuntil = "b"\nnode = "n"\n'
    _, totals = reading(tmp_path, said, "a,b,n\n2024-05-17,2014-05-18,n1\n")
    assert totals.odd == {"outages that end before they begin: they took no time": 1}


@pytest.mark.parametrize("word", ["Unknown", "None", "N/A", "", "null", "0", "(null)"])
def test_an_end_that_is_not_known_is_no_end(tmp_path: Path, word: str) -> None:
    said = 'rows = "outages"\n[columns]\ntime = "a"\nuntil = "b"\nnode = "n"\n'
    part, _ = reading(tmp_path, said, f"a,b,n\n2024-05-17,{word},n1\n")
    assert part.tables["outages"]["until_ns"].to_list() == [None] and not part.rejects
