"""Node drain against scontrol and sinfo programs that keep their state in files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.cli.main import main
from outlast.health.check_settings import DrainSettings
from outlast.health.node_drain import (
    LEDGER,
    PREFIX,
    REASON_MAX,
    DrainedNode,
    drain_allowance,
    drain_node,
    drain_reason,
    recently_drained,
    take_slot,
)
from outlast.health.node_report import NodeReport
from outlast.log_records import Finding

NOW_NS = time.time_ns()
TOOL = """#!{python}
import json, pathlib, sys, time
place = pathlib.Path({place!r})
nodes = json.loads((place / "nodes.json").read_text())
with (place / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if (place / "hangs").exists():
    time.sleep(1000)  # as scontrol where the controller does not answer
if sys.argv[0].endswith("sinfo"):
    for name, (state, reason, when) in nodes.items():
        for partition in ("a", "b"):
            print(f"{{name}}|{{when}}|{{reason or 'none'}}")
elif sys.argv[1] == "show":
    name = sys.argv[3]
    if name not in nodes:
        sys.exit(f"Node {{name}} not found")
    state, reason, when = nodes[name]
    tail = f" Reason={{reason}} [root@2026-01-01T00:00:00]" if reason else ""
    print(f"NodeName={{name}} Arch=x86_64 State={{state}} ThreadsPerCore=2{{tail}}")
else:
    said = dict(word.split("=", 1) for word in sys.argv[2:])
    state = nodes[said["NodeName"]][0]
    nodes[said["NodeName"]] = [state + "+" + said["State"], said["Reason"], str(int(time.time()))]
    (place / "nodes.json").write_text(json.dumps(nodes))
"""


class Slurm:
    """A cluster of which only the state of nodes is known."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in ("scontrol", "sinfo"):
            tool = place / name
            tool.write_text(TOOL.format(python=sys.executable, place=str(place)))
            tool.chmod(0o755)

    def has(self, **nodes: tuple[str, str, str]) -> None:
        fleet = {f"x{k}": ("IDLE", "", "Unknown") for k in range(100)}
        (self.place / "nodes.json").write_text(json.dumps({**fleet, **nodes}))

    def node(self, name: str) -> tuple[str, str]:
        state, said, _ = json.loads((self.place / "nodes.json").read_text())[name]
        return state, said

    @property
    def calls(self) -> list[str]:
        path = self.place / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    place = tmp_path / "slurm"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
    return Slurm(place)


def report(severity: str = "now", detail: str = "GPU has fallen off the bus") -> NodeReport:
    one = Finding(
        t_ns=NOW_NS, cluster="c", node="n1", check="kernel.xid", symptom="gpu-unavailable",
        severity=severity, code="XID 79", device="0000:3b:00.0", detail=detail,  # type: ignore[arg-type]
    )  # fmt: skip
    return NodeReport(
        cluster="c", node="n1", profile="periodic", t_ns=NOW_NS, took_s=0.0,
        severity=severity, findings=(one,), not_applicable=(),  # type: ignore[arg-type]
    )  # fmt: skip


def ago(seconds: float) -> str:
    return str(NOW_NS // 10**9 - round(seconds))


def test_a_bad_node_is_drained_with_our_reason(slurm: Slurm) -> None:
    slurm.has(n1=("MIXED", "", "Unknown"))
    assert drain_node(report(), DrainSettings()).drained
    state, said = slurm.node("n1")
    assert state == "MIXED+DRAIN" and said == (
        "outlast: kernel.xid 0000:3b:00.0 XID 79 GPU has fallen off the bus"
    )
    second = drain_node(report(), DrainSettings())
    assert not second.drained and "out of service (outlast: kernel.xid" in second.why
    assert sum(call.startswith("update") for call in slurm.calls) == 1


def test_the_cluster_of_the_environment_is_not_passed_to_scontrol(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_CLUSTERS makes scontrol drain the node of that name in another cluster."""
    (slurm.place / "scontrol").write_text(
        f"#!/bin/sh\necho clusters=$SLURM_CLUSTERS >>{slurm.place}/said\nexit 1\n"
    )
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    assert not drain_node(report(), DrainSettings()).drained
    assert (slurm.place / "said").read_text() == "clusters=\n"


@pytest.mark.parametrize(
    "state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN", "DOWN+DRAIN", "IDLE+MAINTENANCE+DRAIN", "FAIL"]
)
def test_a_node_drained_by_an_administrator_is_left_unchanged(slurm: Slurm, state: str) -> None:
    slurm.has(n1=(state, "bad fan, ticket 7", ago(60)))
    outcome = drain_node(report(), DrainSettings())
    assert not outcome.drained and "out of service (bad fan, ticket 7)" in outcome.why
    assert slurm.node("n1") == (state, "bad fan, ticket 7")
    assert [call.split()[0] for call in slurm.calls] == ["show"]


@pytest.mark.parametrize("state", ["UNKNOWN", "IDLE*", "DOWN*", "IDLE+NOT_RESPONDING", "IDLE~"])
def test_a_node_that_has_not_registered_is_left_alone(slurm: Slurm, state: str) -> None:
    slurm.has(n1=(state, "", "Unknown"))
    outcome = drain_node(report(), DrainSettings())
    assert not outcome.drained and "not registered with Slurm" in outcome.why
    assert slurm.node("n1")[0] == state


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd", "prolog_task"])
def test_slurm_is_not_called_from_its_own_scripts(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, context: str
) -> None:
    """Whatever the profile is: there slurmctld may wait for us."""
    slurm.has(n1=("IDLE", "", "Unknown"))
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", context)
    assert not drain_node(report(), DrainSettings()).drained
    assert slurm.calls == []


@pytest.mark.parametrize("severity", ["unknown", "warn", "healthy"])
def test_only_what_costs_a_job_drains(slurm: Slurm, severity: str) -> None:
    slurm.has(n1=("IDLE", "", "Unknown"))
    assert not drain_node(report(severity), DrainSettings()).drained
    assert slurm.calls == []


def test_the_breaker_counts_ours_of_the_last_hour_only(slurm: Slurm) -> None:
    """Of 103 nodes 2 % are two."""
    old, theirs = ("IDLE+DRAIN", "outlast: a", ago(4000)), ("DOWN", "ticket", ago(10))
    slurm.has(n1=("IDLE", "", "Unknown"), a=("IDLE+DRAIN", "outlast: a", ago(10)), b=old)
    assert drain_node(report(), DrainSettings(percent=2)).drained
    slurm.has(
        n1=("IDLE", "", "Unknown"), a=("IDLE+DRAIN", "outlast: a", ago(10)),
        b=("IDLE+DRAIN", "outlast: b", "Unknown"), c=theirs,
    )  # fmt: skip
    outcome = drain_node(report(), DrainSettings(percent=2))
    assert not outcome.drained and "drained within 3600 s, the limit is 2" in outcome.why
    assert slurm.node("n1") == ("IDLE", "")


def test_a_slurm_that_does_not_answer_drains_nothing(slurm: Slurm) -> None:
    slurm.has(n1=("IDLE", "", "Unknown"))
    (slurm.place / "hangs").touch()
    outcome = drain_node(report(), DrainSettings(deadline_s=0.5))
    assert not outcome.drained and "scontrol did not answer within 0.5 s" in outcome.why


def test_a_slurm_that_is_not_there_or_knows_no_such_node(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.has()
    assert "Node n1 not found" in drain_node(report(), DrainSettings()).why
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "scontrol: No such file" in drain_node(report(), DrainSettings()).why


def test_no_name_becomes_an_option(slurm: Slurm) -> None:
    for name in ("-h", "a b", "n[1-3]", "", "ALL,x", "a=b"):
        one = report()
        outcome = drain_node(NodeReport(**{**_fields(one), "node": name}), DrainSettings())
        assert not outcome.drained and "is not a node name" in outcome.why
    assert slurm.calls == []


def _fields(one: NodeReport) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_the_shared_ledger_limits_the_drained_nodes(slurm: Slurm, tmp_path: Path) -> None:
    slurm.has(n1=("IDLE", "", "Unknown"))
    shared = tmp_path / "shared"
    settings = DrainSettings(percent=2, shared=str(shared), deadline_s=20)
    assert "could not be queried (FileNotFoundError" in drain_node(report(), settings).why
    shared.mkdir()
    for name in ("a", "b"):
        assert take_slot(shared, name, 2, NOW_NS, 3600).granted
    outcome = drain_node(report(), settings)
    assert not outcome.drained and "2 nodes were drained within 3600 s by the ledger" in outcome.why
    (shared / LEDGER).write_text("{damaged")
    assert "is damaged" in drain_node(report(), settings).why
    (shared / LEDGER).unlink()
    assert drain_node(report(), settings).drained


SLOT = """
import sys, time
from pathlib import Path
from outlast.health.node_drain import take_slot
slot = take_slot(Path(sys.argv[1]), sys.argv[2], 3, int(sys.argv[3]), 3600)
print(int(slot.granted))
"""


@pytest.mark.process
def test_concurrent_drains_respect_the_limit(tmp_path: Path) -> None:
    many = [
        subprocess.Popen(
            [sys.executable, "-c", SLOT, str(tmp_path), f"n{k}", str(NOW_NS)],
            stdout=subprocess.PIPE, text=True,
        )
        for k in range(6)
    ]  # fmt: skip
    granted = [int(each.communicate(timeout=60)[0]) for each in many]
    assert sum(granted) == 3
    later = NOW_NS + 3601 * 10**9
    assert take_slot(tmp_path, "n9", 3, later, 3600).granted, "an hour later there is room again"


def test_a_ledger_that_is_a_link_drains_no_node(slurm: Slurm, tmp_path: Path) -> None:
    slurm.has(n1=("IDLE", "", "Unknown"))
    shared, target = tmp_path / "shared", tmp_path / "crontab"
    shared.mkdir()
    asked = DrainSettings(shared=str(shared), deadline_s=20)
    (shared / LEDGER).symlink_to(target)
    assert "could not be queried" in drain_node(report(), asked).why
    assert not target.exists()
    (shared / LEDGER).unlink()
    target.write_text("")
    (shared / LEDGER).hardlink_to(target)
    assert "not a regular file" in drain_node(report(), asked).why
    (shared / LEDGER).unlink()
    shared.chmod(0o777)
    assert "any user can write" in drain_node(report(), asked).why
    assert slurm.node("n1")[0] == "IDLE" and target.read_text() == ""
    shared.chmod(0o755)
    assert drain_node(report(), asked).drained


def test_the_command_drains_and_prints_a_note(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.has(n1=("IDLE", "", "Unknown"))
    settings = tmp_path / "check.toml"
    settings.write_text('node = "n1"\n[memory]\ntotal_gib = 1e6\n')
    asked = ["check", "--only", "memory", "--settings", str(settings), "--drain"]
    assert main(asked) == 1
    assert "note: drained: n1 was drained: outlast: memory" in capsys.readouterr().out
    assert slurm.node("n1")[0] == "IDLE+DRAIN"


@given(st.text(max_size=400))
@settings(max_examples=80)
def test_a_reason_is_one_plain_line(said: str) -> None:
    found = drain_reason(said)
    assert found.startswith(PREFIX) and len(found) <= REASON_MAX
    assert not set("\n\r|'\"`$\\<>&*?[]{}\0") & set(found)


@given(st.integers(0, 10_000), st.floats(0.1, 100))
@settings(max_examples=50)
def test_the_allowance_is_a_share_but_never_none(nodes: int, percent: float) -> None:
    most = drain_allowance(nodes, percent)
    assert most == 1 or most <= nodes * percent / 100


def test_recently_drained_nodes() -> None:
    past = [DrainedNode("a", 0), DrainedNode("b", None), DrainedNode("c", 50), DrainedNode("c", 60)]
    assert recently_drained(past, 100, 60e-9) == {"b", "c"}
