"""Fleet report of a cluster with outages and without jobs."""

from __future__ import annotations

import pytest
from tests.fleet.job_attempts import attempt, of

from outlast.fleet.analysis import outages
from outlast.fleet.record_tables import DAY_NS, Tables, tables
from outlast.fleet.report.fleet_report import build_report
from outlast.fleet.report.report_sections import DrawnSection
from outlast.log_records import Finding, NodeSeen, Outage

HOUR_NS = DAY_NS // 24
DAYS = 60


@pytest.fixture(scope="module")
def trace() -> Tables:
    """Of 20 nodes one goes away every fourth day, for an hour, and in the second month another one
    every day."""
    seen = [
        NodeSeen(t_ns=0, cluster="c", node=f"n{k}", kind="", gpus=8, rack="", pod="")
        for k in range(20)
    ]
    gone = [("n7", day, "ib-link") for day in range(0, DAYS, 4)]
    gone += [(f"n{8 + day % 12}", day, "thermal") for day in range(30, DAYS)]
    went = [
        Outage(t_ns=day * DAY_NS, cluster="c", node=node, until_ns=day * DAY_NS + HOUR_NS,
               symptom=symptom, detail="")  # type: ignore[arg-type]
        for node, day, symptom in gone
    ]  # fmt: skip
    return tables([*seen, *went], 0, DAYS * DAY_NS)


@pytest.fixture(scope="module")
def told(trace: Tables) -> dict[str, DrawnSection]:
    return {one.section.key: one for one in build_report(trace, "a trace").sections}


def test_lemons_are_ranked_by_outages(told: dict[str, DrawnSection]) -> None:
    """The page once said that no node of such a cluster is bad."""
    section = told["lemons"].section
    assert [row["node"] for row in section.rows if row["called"]] == ["n7"]
    assert section.notes == ["1 lemon among 20 nodes of the cluster"]


def test_headlines_are_outages(trace: Tables) -> None:
    """It was that no node is bad, of those that ran jobs."""
    rate, lemons = build_report(trace, "a trace").report.headlines
    assert (rate.figure, rate.description) == ("37.56", "outages in 1000 node-days")
    assert rate.rests_on.endswith("; 45 outages of 20 nodes")
    assert (lemons.figure, lemons.rests_on) == ("1", "n7")


def test_the_rate_of_outages_is_drawn(told: dict[str, DrawnSection]) -> None:
    """It was an empty figure of 1970."""
    section = told["rolling"].section
    assert told["rolling"].draw is not None
    low, high = 3, 4 + 15  # in 15 days, each of which takes an hour of 20 nodes that are up
    swing = high / (300 - high / 24) / (low / (300 - low / 24))
    assert section.notes == [f"the highest rate is {swing:.1f} times the lowest"]


def test_symptoms_of_outages(trace: Tables, told: dict[str, DrawnSection]) -> None:
    rows = told["causes"].section.rows
    assert [(row["symptom"], row["outages"], row["nodes"]) for row in rows] == [
        ("thermal", 30, 12),
        ("ib-link", 15, 1),
    ]
    assert all(row["median_h"] == pytest.approx(1.0) for row in rows)
    whole = outages.outage_rate(trace).per_1000_node_days
    assert sum(row["per_1000_node_days"] for row in rows) == pytest.approx(whole)


def test_possible_domains_of_a_failure() -> None:
    """Table I: what was found of each failure leaves users, software or hardware."""
    ran = [attempt(node, 0, 5, hosts=node, state="NODE_FAIL") for node in ("n1", "n2", "n3", "n4")]
    seen = [("n1", "pcie"), ("n2", "pcie"), ("n2", "filesystem"), ("n3", "services")]
    signs = [
        Finding(t_ns=ran[0].t_ns, cluster="c", node=node, check="x", symptom=symptom,
                severity="now", code="", device="", detail="")  # type: ignore[arg-type]
        for node, symptom in seen
    ]  # fmt: skip
    found = build_report(of(*ran, *signs, days=2), "a cluster")
    (causes,) = [one.section for one in found.sections if one.section.key == "causes"]
    assert {row["cause"]: row["domains"] for row in causes.rows} == {
        "pcie": "hardware", "filesystem": "system", "services": "user, system, hardware",
        "unattributed": "", "all": "",
    }  # fmt: skip
    assert causes.notes == [
        "for 1 failure the nodes have no finding",
        "possible origins by the findings of 3 failures: 1 of more than one at once, 1 of hardware,"
        " 1 of user or system or hardware",
    ]


def test_codes_have_actions_and_disagreeing_sources() -> None:
    ran = [attempt(f"{k}", 24 * k, 24 * k + 5, hosts="n1", state="NODE_FAIL") for k in range(3)]
    seen = [
        Finding(t_ns=one.t_ns, cluster="c", node="n1", check="kernel.xid", symptom="gpu-memory",
                severity="now", code=code, device="", detail="")
        for one, code in zip(ran, ["XID 79", "XID 79", "XID 94"], strict=True)
    ]  # fmt: skip
    found = build_report(of(*ran, *seen, days=5), "a cluster")
    (codes,) = [one.section for one in found.sections if one.section.key == "codes"]
    first, second = codes.rows
    assert (first["code"], first["failures"], first["nodes"]) == ("XID 79", 2, 1)
    assert first["mends"] == "a reboot" and "fallen off the bus" in first["name"]
    assert second["code"] == "XID 94" and second["takes"] and second["leaves"]


@pytest.mark.parametrize(
    ("node", "named", "said"),
    [
        (
            "n1.example.org",
            "c",
            "none of 1 node with findings ran a job: are n1.example.org and n1",
        ),
        ("n1", "d", "findings are of cluster d, jobs of c"),
        ("n1", "c", ""),
    ],
)
def test_findings_that_are_of_no_node_of_a_job(node: str, named: str, said: str) -> None:
    """Nothing was attributed then, and nothing said why."""
    ran = [attempt(str(k), 24 * k, 24 * k + 5, hosts="n1", state="NODE_FAIL") for k in range(3)]
    seen = Finding(t_ns=ran[0].t_ns + DAY_NS // 2, cluster=named, node=node, check="x",
                   symptom="pcie", severity="now", code="", device="", detail="")  # fmt: skip
    found = build_report(of(*ran, seen, days=5), "a cluster")
    (causes,) = [one.section for one in found.sections if one.section.key == "causes"]
    assert [note for note in causes.notes if note.startswith(said or "none of")] == causes.notes[1:]
    assert len(causes.notes) == 1 + bool(said)


def test_both_intervals_of_r_f_are_noted() -> None:
    """By jobs that fail again and again, each on a day of its own, and by days."""
    ran = [
        attempt(f"{k}", 24 * k, 24 * k + 12, gpus=256, nodes=32, hosts="n[1-32]", name=f"{k % 4}",
                state="NODE_FAIL" if k % 4 == 0 else "COMPLETED")
        for k in range(20)
    ]  # fmt: skip
    found = build_report(of(*ran, days=21), "a cluster")
    (mttf,) = [one.section for one in found.sections if one.section.key == "mttf"]
    (note,) = [note for note in mttf.notes if note.startswith("r_f")]
    assert "15.62 failures in 1000 node-days" in note and "by drawing runs anew" in note
    assert [row["clusters"] for row in mttf.rows] == ["runs"]


def test_nothing_at_all_is_no_figure() -> None:
    found = build_report(tables([], 0, 10 * DAY_NS), "nothing")
    assert [one.section.key for one in found.sections if one.draw] == []
