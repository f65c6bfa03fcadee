"""Lemon nodes: signals, ranking and drain candidates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.job_attempts import T0_NS, at_ns, attempt, failed, of
from tests.fleet.whole_log import read_whole

from outlast.errors import UsageError
from outlast.fleet.analysis import goodput_loss
from outlast.fleet.analysis.failure_attribution import (
    attribute_failures,
    attribute_to_nodes,
    merge_simultaneous,
    worst_nodes,
)
from outlast.fleet.analysis.job_runs import node_fails
from outlast.fleet.analysis.lemon_evidence import drain_commands
from outlast.fleet.analysis.lemons import (
    benjamini_hochberg,
    node_signals,
    rank_lemons,
    score_ranking,
)
from outlast.fleet.analysis.measured_ettr import measured_ettr
from outlast.fleet.formats import outage_logs
from outlast.fleet.record_tables import DAY_NS, Tables
from outlast.fleet.synth.synthetic_cluster import RSC1, make_cluster
from outlast.log_records import Finding, JobEnded, NodeSeen, Outage, Repair
from outlast.theory.numerics import poisson_above


def finding(node: str, hours: float, code: str = "XID 79", **more: Any) -> Finding:
    of_it: dict[str, Any] = {
        "cluster": "c", "check": "xid", "symptom": "gpu-unavailable", "severity": "now",
        "device": "", "detail": "",
    }  # fmt: skip
    return Finding(t_ns=at_ns(hours), node=node, code=code, **{**of_it, **more})


def row(found: pl.DataFrame, node: str) -> dict[str, Any]:
    (one,) = found.filter(pl.col("node") == node).iter_rows(named=True)
    return one


def test_the_seven_signals() -> None:
    broken: dict[str, Any] = {"state": "NODE_FAIL"}
    made = of(
        attempt("1", 0, 24, hosts="n1", **broken),
        attempt("2", 24, 48, hosts="n1", excluded="n[2-3]"),
        attempt("3", 24, 48, hosts="n2", excluded="n3"),
        attempt("3", 48, 50, hosts="n2", excluded="n3", attempt=1),
        attempt("4", 60, 72, hosts="n[1-4]", nodes=4, gpus=32, **broken),
        attempt("5", 72, 96, hosts="n[1-4]", nodes=4, gpus=32, failed_node="n2", **broken),
        finding("n1", 10), finding("n1", 11), finding("n1", 12, code="XID 48"),
        finding("n1", 12, code="SXID 20034"),
        Repair(t_ns=at_ns(1), cluster="c", node="n1", kind="ticket", part="", detail=""),
        Repair(t_ns=at_ns(2), cluster="c", node="n1", kind="swap", part="gpu", detail=""),
        Outage(t_ns=at_ns(-5), cluster="c", node="n1", until_ns=at_ns(2), symptom="other",
               detail=""),
        Outage(t_ns=at_ns(80), cluster="c", node="n1", until_ns=None, symptom="other", detail=""),
        Outage(t_ns=at_ns(-9), cluster="c", node="n1", until_ns=at_ns(-5), symptom="other",
               detail=""),
        NodeSeen(t_ns=T0_NS, cluster="c", node="n9", kind="b", gpus=8, rack="", pod=""),
    )  # fmt: skip
    found = node_signals(made, node_fails(made)).collect()
    first, second, third = (row(found, node) for node in ("n1", "n2", "n3"))
    assert (first["xid_cnt"], first["tickets"], first["out_count"]) == (2, 1, 2)
    assert (second["excl_jobid_count"], third["excl_jobid_count"]) == (1, 2)
    assert (first["single_node_nodefails"], first["multi_node_nodefails"]) == (1, 0.25)
    assert second["multi_node_nodefails"] == 1.25
    assert first["single_node_nodefailure_rate"] == 0.5
    assert third["single_node_nodefailure_rate"] is None
    assert first["node_days"] == pytest.approx(2 + 1.5)
    assert row(found, "n9")["node_days"] == 0 and row(found, "n9")["kind"] == "b"


def test_a_share_of_a_node_is_a_share_of_its_time() -> None:
    """Eight jobs of one GPU side by side are a node's day, not eight."""
    seen = NodeSeen(t_ns=T0_NS, cluster="c", node="n1", kind="", gpus=8, rack="", pod="")
    made = of(*(attempt(str(n), 0, 24, gpus=1, hosts="n1") for n in range(8)), seen)
    assert row(node_signals(made, failed()).collect(), "n1")["node_days"] == pytest.approx(1)


def test_only_time_in_the_window_counts() -> None:
    made = of(attempt("1", -24, 24, hosts="n1"), attempt("2", 48, 24 * 40, hosts="n2"))
    found = node_signals(made, failed()).collect()
    assert row(found, "n1")["node_days"] == pytest.approx(1)
    assert row(found, "n2")["node_days"] == pytest.approx(26)


def test_jobs_that_share_a_node_die_of_one_failure() -> None:
    made = of(*(attempt(str(n), 0, 5 + n / 60, gpus=1, hosts="n1", state="NODE_FAIL")
                for n in range(8)),
              attempt("9", 6, 7, hosts="n1", state="NODE_FAIL"))  # fmt: skip
    found = merge_simultaneous(attribute_to_nodes(made, node_fails(made))).collect()
    assert found["t_ns"].to_list() == [at_ns(5), at_ns(7)]
    assert found["weight"].to_list() == [1, 1]


def test_the_worst_finding_names_the_node() -> None:
    made = of(
        attempt("1", 0, 5, hosts="n[1-4]", nodes=4, state="NODE_FAIL"),
        finding("n3", 4.99), finding("n2", 4.98, severity="warn"),
        attempt("2", 6, 9, hosts="n[1-4]", nodes=4, state="NODE_FAIL"),
    )  # fmt: skip
    found = attribute_to_nodes(made, worst_nodes(attribute_failures(made))).collect()
    first, second = (found.filter(pl.col("job") == job) for job in "12")
    assert first.select("node", "weight", "named").rows() == [("n3", 1.0, True)]
    assert sorted(second["node"].to_list()) == ["n1", "n2", "n3", "n4"]
    assert second["weight"].to_list() == [0.25] * 4 and not second["named"].any()


def fleet(
    rng: np.random.Generator, *, nodes: int = 100, days: int = 28, bad: tuple[str, ...] = ()
) -> list[JobEnded]:
    """Every node runs a day's job a day; one in a hundred breaks, half of a bad node's."""
    made = []
    for node in range(nodes):
        name = f"n{node}"
        for day in range(days):
            broke = rng.random() < (0.5 if name in bad else 0.01)
            state = "NODE_FAIL" if broke else "COMPLETED"
            made.append(attempt(f"{node}/{day}", 24 * day, 24 * day + 23, hosts=name, state=state))
    return made


def test_bad_nodes_are_found_and_no_others() -> None:
    bad = ("n7", "n55")
    made = of(*fleet(np.random.default_rng(1), bad=bad))
    found = rank_lemons(made, node_fails(made))
    assert set(found.filter("lemon")["node"]) == set(bad)
    best = row(found, "n7")
    rate = best["expected"] / best["node_days"]
    assert rate == pytest.approx(0.01 * 24 / 23, rel=0.4)  # the lemons are left out of it
    assert best["p"] == pytest.approx(poisson_above(best["failures"] - 1, best["expected"]))
    score = score_ranking(found, bad)
    assert (score.precision, score.recall, score.precision_at_80) == (1, 1, 1)


def test_chance_alone_makes_no_lemons() -> None:
    called = [
        rank_lemons(made, node_fails(made))["lemon"].sum()
        for made in (of(*fleet(np.random.default_rng(seed))) for seed in range(5))
    ]
    assert sum(called) == 0


def test_shares_alone_make_no_lemon() -> None:
    """However often jobs of a pair die, of neither node is known that it was."""
    pairs = [
        attempt(f"p{day}", 24 * day, 24 * day + 23, hosts="n[1-2]", nodes=2, gpus=16,
                state="NODE_FAIL")
        for day in range(28)
    ]  # fmt: skip
    others = [
        attempt(f"{n}/{day}", 24 * day, 24 * day + 23, hosts=f"n{n}")
        for day in range(28) for n in range(3, 40)
    ]  # fmt: skip
    found = rank_lemons(made := of(*pairs, *others), node_fails(made))
    assert found["node"][0] in ("n1", "n2") and not found["lemon"].any()


def test_history_convicts_and_the_present_must_agree() -> None:
    """A failure a month is nothing in a month; a node mended long ago is none."""
    rng = np.random.default_rng(3)
    made = [one for one in fleet(rng, days=112) if one.hosts not in ("n1", "n2")]
    slow = [(n, "NODE_FAIL" if n % 11 == 5 else "COMPLETED") for n in range(112)]
    old = [(n, "NODE_FAIL" if n < 20 else "COMPLETED") for n in range(112)]
    for node, days in (("n1", slow), ("n2", old)):
        made += [
            attempt(f"{node}/{n}", 24 * n, 24 * n + 23, hosts=node, state=state)
            for n, state in days
        ]
    long = of(*made, days=112)
    infra = node_fails(long)
    with_past = rank_lemons(long, infra, times_min=2)
    assert with_past["past_node_days"].sum() > 3.5 * with_past["node_days"].sum()
    without = rank_lemons(long, infra, times_min=2, history_days=28)
    assert row(with_past, "n1")["p"] < row(without, "n1")["p"]
    assert row(with_past, "n1")["lemon"] and not row(without, "n1")["lemon"]
    assert row(with_past, "n2")["p"] < 1e-9 and not row(with_past, "n2")["lemon"]


def test_kinds_are_held_against_their_own() -> None:
    """All nodes of a bad kind fail often: none of them is the lemon."""
    rng = np.random.default_rng(4)
    bad = tuple(f"n{n}" for n in range(30))
    seen = [
        NodeSeen(t_ns=T0_NS, cluster="c", node=f"n{n}", kind="new" if n < 30 else "old", gpus=8,
                 rack="", pod="")
        for n in range(100)
    ]  # fmt: skip
    made = of(*fleet(rng, bad=bad), *seen)
    assert not rank_lemons(made, node_fails(made))["lemon"].any()


def outage(node: str, since_h: float, until_h: float | None) -> Outage:
    until_ns = None if until_h is None else at_ns(until_h)
    return Outage(
        t_ns=at_ns(since_h), cluster="c", node=node, until_ns=until_ns, symptom="other", detail=""
    )


def test_outages_where_no_job_is_known() -> None:
    """A node that is away cannot fail: its days are those that it was up."""
    seen = [
        NodeSeen(t_ns=T0_NS, cluster="c", node=f"n{n}", kind="", gpus=8, rack="", pod="")
        for n in range(100)
    ]  # fmt: skip
    made = of(
        *seen,
        *(outage("n1", 48 * n, 48 * n + 24) for n in range(14)),
        *(outage(f"n{n}", 5 * n, 5 * n + 1) for n in range(10, 30)),
        outage("n2", 24, None),
    )
    found = rank_lemons(made, failed(), by="outages")
    assert found.filter("lemon")["node"].to_list() == ["n1"]
    assert row(found, "n1")["node_days"] == pytest.approx(14)
    assert row(found, "n2")["node_days"] == pytest.approx(1)
    assert len(found) == 100
    assert len(rank_lemons(made, failed())) == 0


def test_a_server_of_the_real_trace(traces: Path) -> None:
    """Of 400 servers one went away 8 times in the last month, and 14 times in the year."""
    cluster_ = outage_logs.TracedCluster(T0_NS, "c", nodes=400, gpus_per_node=8)
    trace = traces / "infinitehbd" / "fault_trace.json"
    read = read_whole(outage_logs.read_fault_trace(trace, cluster_)).tables
    outages = read["outages"]
    until_ns = max(t_ns for t_ns in outages["t_ns"]) + 1
    made = of()._replace(
        outages=outages.lazy(), nodes=read["nodes"].lazy(), since_ns=T0_NS, until_ns=until_ns
    )
    for days, failures in ((28, 8), (348, 14)):
        worst = rank_lemons(made, failed(), days=days, history_days=348, by="outages").row(
            0, named=True
        )
        assert worst["lemon"] and worst["node"].startswith("e7b02619")
        assert worst["failures"] == failures


def test_little_data_makes_no_lemon() -> None:
    one = of(attempt("1", 0, 1, hosts="n1", state="NODE_FAIL"), attempt("2", 0, 1, hosts="n2"))
    assert not rank_lemons(one, node_fails(one))["lemon"].any()
    assert len(rank_lemons(of(), failed())) == 0


@pytest.mark.parametrize(
    ("more", "name"),
    [({"fdr": 0}, "fdr"), ({"days": 0}, "days"), ({"history_days": 1}, "history_days")],
)
def test_impossible_questions_are_refused(more: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=name):
        rank_lemons(of(), failed(), **more)


def test_lemons_of_a_synthetic_cluster_are_found() -> None:
    """A quarter of RSC-1 over 28 days, as its logs say it; benchmarks/fleet_truth.py has many."""
    made, truth = make_cluster(RSC1, 28, seed=5, nodes=512)
    infra = worst_nodes(attribute_failures(made))
    score = score_ranking(rank_lemons(made, infra), truth.lemons)
    assert score.precision_at_80 is not None and score.precision_at_80 >= 0.9
    assert score.called - score.right <= 1 and score.right >= 0.8 * score.true
    told = goodput_loss.total_loss(made, goodput_loss.lost_goodput(made, infra)).second_share
    assert told is not None and abs(told - truth.second_order_share) < 0.02
    runs = measured_ettr(made, infra, qos=["high"], across_s=3600)
    assert truth.ettr is not None and runs["ettr"].mean() == pytest.approx(truth.ettr, abs=0.01)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), max_size=20), st.floats(0.01, 0.5))
def test_benjamini_and_hochberg(p: list[float], fdr: float) -> None:
    """Against the step-up rule itself: up to the last rank k with p_(k) <= k fdr/n."""
    ranked = sorted(p)
    passing = [k for k, each in enumerate(ranked, 1) if each * len(p) / k <= fdr]
    called = sum(q <= fdr for q in benjamini_hochberg(p))
    assert called == (max(passing) if passing else 0)
    assert all(q >= each * (1 - 1e-12) for q, each in zip(benjamini_hochberg(p), p, strict=True))


def test_a_component_of_a_heterogeneous_job_does_not_blame_its_own_node() -> None:
    """One node failed, and each component's only node was taken for a bad one as well."""
    made = of(
        attempt("12+0", 0, 5, hosts="n[1-2]", nodes=2, state="NODE_FAIL", failed_node="n1"),
        attempt("12+1", 0, 5, hosts="c1", state="NODE_FAIL"),
        attempt("13", 0, 5, hosts="c2", state="NODE_FAIL"),
    )
    told = attribute_to_nodes(made, node_fails(made)).select("job", "node").collect()
    assert sorted(told.rows()) == [("12+0", "n1"), ("12+1", "n1"), ("13", "c2")]


def ranking(*names: str) -> pl.DataFrame:
    rows = [("c", name, True, 5.0, 0.1, 50.0) for name in names]
    schema = ["cluster", "node", "lemon", "failures", "expected", "times"]
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_drain_lines_are_shell_safe() -> None:
    names = ("gpu-01", "n2; rm -rf /", "a b", "-x", "$(id)", "n\n3", "")
    found = drain_commands(ranking(*names), share_max=1)
    assert found.unsafe == list(names[1:])
    (line,) = found.lines
    asked = ["scontrol", "-M", "c", "update", "NodeName=gpu-01", "State=DRAIN"]
    assert shlex.split(line)[:6] == asked
    assert shlex.split(line)[6] == "Reason=lemon: 5 failures, 0.1 expected, 50 times"


def test_never_more_than_a_share() -> None:
    names = [f"n{n}" for n in range(10)]
    found = drain_commands(ranking(*names), share_max=0.25)
    assert len(found.lines) == 2 and found.beyond == names[2:]
    assert len(drain_commands(ranking(*names), share_max=0.01).lines) == 1
    assert not drain_commands(ranking(*names), share_max=0).lines
    with pytest.raises(UsageError, match="share_max"):
        drain_commands(ranking(*names), share_max=2)


def test_windows_end_where_the_tables_end() -> None:
    """A failure before the last days is history."""
    made: Tables = of(*fleet(np.random.default_rng(8), days=60), days=60)
    found = rank_lemons(made, node_fails(made), days=10)
    assert (found["node_days"] <= 10).all()
    assert all(last_ns >= T0_NS + 50 * DAY_NS for last_ns in found["last_ns"].drop_nulls())
    assert (found["past_failures"] >= found["failures"]).all()
