"""Sparse data and equal names: no figure without data, no mixture of clusters."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from tests.fleet.job_attempts import put
from tests.fleet.small_clusters import DAY_NS, HOUR, T0, S, cluster, finding, job

from outlast.cli.main import main
from outlast.errors import LakeError, UsageError
from outlast.figure_style import svg
from outlast.fleet.analysis.exposure import node_inventory
from outlast.fleet.analysis.failure_attribution import attribute_failures, worst_nodes
from outlast.fleet.analysis.failure_rates import rolling_rates
from outlast.fleet.analysis.fitted_rates import fit_rates
from outlast.fleet.analysis.lemons import rank_lemons
from outlast.fleet.analysis.outages import failure_outcomes, outage_rate, part_replacements
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window
from outlast.fleet.rates_file import RatesSource, format_rates
from outlast.fleet.record_tables import Tables
from outlast.fleet.report.fleet_report import FleetReport, build_report
from outlast.log_records import NodeSeen, Outage, Repair
from outlast.plan.model.scenario import scenario_of

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def said(found: Tables, *, drawn: bool = False) -> FleetReport:
    """A report, of which every figure is a number or none; and that can be drawn."""
    whole = build_report(found, "x")
    assert not list(_not_finite(msgspec.to_builtins(whole.report)))
    for one in whole.sections if drawn else ():
        if one.draw:
            assert "<svg" in svg(one.draw, one.section.key)
    return whole.report


def _not_finite(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _not_finite(one)
    elif isinstance(value, float) and not math.isfinite(value):
        yield value


def outage(node: str, at: float, hours: float | None, name: str = "c") -> Outage:
    begun = T0 + round(at * HOUR)
    until = None if hours is None else begun + round(hours * HOUR)
    return Outage(t_ns=begun, cluster=name, node=node, until_ns=until, symptom="other", detail="")


def rows(of: FleetReport, key: str) -> list[dict[str, Any]]:
    (section,) = (one for one in of.sections if one.key == key)
    return section.rows


@pytest.mark.parametrize(
    "more",
    [
        {"gpus": 0},
        {"hours": 0.0},
        {"hours": -3.0},
        {"start_ns": None},
        {"start_ns": None, "hosts": "", "nodes": 0, "gpus": 0},
    ],
    ids=str,
)
def test_failures_that_cost_no_gpu_time(more: dict[str, Any]) -> None:
    found = cluster(job(state="NODE_FAIL", **more))
    drawn = more in ({"hours": 0.0}, {"start_ns": None})
    headlines = said(found, drawn=drawn).headlines
    (cost,) = [one for one in headlines if "lost to failures" in one.description]
    assert (cost.figure, cost.rests_on) == ("0", "the attempts that they ended held no GPUs")


def test_without_a_failure_a_rate_has_an_upper_bound() -> None:
    found = said(cluster(job(end=100, hours=100, gpus=256, nodes=32, hosts="n[1-32]")))
    rate = found.headlines[0]
    below = 1000 * -math.log(0.05) / (32 * 100 / 24)
    assert rate.figure == f"below {below:.2f}" and "after 133 node-days" in rate.rests_on


def test_jobs_without_gpus_are_no_training() -> None:
    found = cluster(job(end=100, hours=90, gpus=0), job("2", end=200, hours=90, gpus=0))
    assert rows(said(found, drawn=True), "ettr") == []


def test_only_what_lies_in_the_window_is_counted_as_read() -> None:
    found = cluster(
        job(end=24), job("2", end=260, hours=200), job("3", end=250, hours=1),
        finding(at=-0.1), finding(at=1), finding(at=240.1),
        outage("n1", -5, 1), outage("n1", -5, 6), outage("n1", 300, 1),
    )  # fmt: skip
    assert said(found).records == {
        "jobs": 2, "findings": 1, "outages": 1, "repairs": 0, "nodes": 0, "checks": 0,
        "interruptions": 0, "costs": 0, "bandwidths": 0,
    }  # fmt: skip


def test_where_only_a_lemon_failed_its_odds_are_not_infinite() -> None:
    bad = [
        job(str(nth), end=20 * nth + 10, hours=9, hosts="bad", state="NODE_FAIL")
        for nth in range(6)
    ]
    good = [job(f"g{nth}", end=200, hours=200, hosts=f"n{nth}") for nth in range(60)]
    found = cluster(*bad, *good)
    ranking = rank_lemons(found, worst_nodes(attribute_failures(found)), history_days=28)
    first = ranking.row(0, named=True)
    assert (first["node"], first["lemon"]) == ("bad", True)
    fleet = 0.5 / (60 * 200)
    expected = 6 * 9 * 2 / (2 / fleet + 60 * 200)  # of a kind that never failed
    assert first["expected"] == pytest.approx(expected)
    assert first["p"] == pytest.approx(expected**6 / math.factorial(6), rel=0.01)
    assert rows(said(found), "lemons")[0]["times"] == pytest.approx(6 / expected)
    told = fit_rates(found)
    assert "lemon-factor" not in told.scenario
    assert any("only lemons failed" in note for note in told.notes)


def test_a_node_on_which_jobs_die_at_once_makes_no_file_that_plans_refuse(tmp_path: Path) -> None:
    bad = [
        job(str(nth), end=nth + 1, hours=1e-4, hosts="bad", state="NODE_FAIL") for nth in range(6)
    ]
    good = [
        job(
            f"g{nth}",
            end=200,
            hours=200,
            hosts=f"n{nth}",
            state="NODE_FAIL" if not nth else "FAILED",
        )
        for nth in range(40)
    ]
    found = fit_rates(cluster(*bad, *good))
    assert found.scenario["lemon-factor"] == 1e6
    path = tmp_path / "rates.toml"
    path.write_text(format_rates(found, RatesSource("x", "d")))
    assert scenario_of({"gpus": "1024", "rates": str(path)}).gpus_per_node == 8


def test_a_node_that_was_never_up_has_no_rate() -> None:
    found = cluster(outage("n1", 0, None))
    assert outage_rate(found).per_1000_node_days is None
    almost = cluster(outage("n1", 0, None), outage("n1", 1, 1))._replace(since_ns=T0 - 1000)
    assert outage_rate(almost).per_1000_node_days is None
    with pytest.raises(LakeError, match="nothing to measure"):
        fit_rates(almost)


def test_a_rolling_rate_is_of_whole_days() -> None:
    """Of four, and half of one on either side, on which a failure would weigh eight times."""
    jobs = [job(f"{at}", end=at, hours=1, state="NODE_FAIL") for at in (-11.9, 36, 96.1)]
    found = cluster(*jobs, job("long", end=200, hours=300), outage("n2", 97, 1))
    found = found._replace(since_ns=T0 - DAY_NS // 2, until_ns=T0 + 4 * DAY_NS + DAY_NS // 2)
    told = rolling_rates(found, attribute_failures(found), days=1).filter(pl.col("cause") == "all")
    assert told["failures"].to_list() == [0, 1, 0, 0]
    assert told["node_days"].to_list() == pytest.approx([1, 1 + 1 / 24, 1, 1 + 0.9 / 24])
    assert outage_rate(found).per_day_variance is None  # no whole day has one
    assert outage_rate(found).outages == 1


def both(records: list[Any]) -> list[Any]:
    """And the same of another cluster."""
    return [*records, *(msgspec.structs.replace(one, cluster="d") for one in records)]


def test_outages_of_another_cluster_are_not_counted() -> None:
    """Nodes have the same names in both."""
    ours = job(end=24, hours=24, nodes=4, hosts="n[1-4]", state="NODE_FAIL", failed_node="n1")
    theirs = [outage(f"n{nth}", 24, 5, "d") for nth in range(1, 5)]
    found = cluster(ours, *theirs)
    left = failure_outcomes(found, attribute_failures(found), above_gpus=0)
    assert (left.failures, left.went_on, left.wide) == (1, 1, 0)
    mine = cluster(ours, *(msgspec.structs.replace(one, cluster="c") for one in theirs))
    assert failure_outcomes(mine, attribute_failures(mine), above_gpus=0).wide == 1
    one = cluster(ours, outage("n1", 24.1, 5))
    assert failure_outcomes(one, attribute_failures(one), above_gpus=0).went_on == 0
    part = Repair(t_ns=T0 + 1, cluster="c", node="n1", kind="swap", part="gpu", detail="")
    (told,) = part_replacements(cluster(*both([part]))).to_dicts()
    assert (told["swaps"], told["nodes"]) == (2, 2)


def test_findings_near_a_window_explain_failures_in_it(tmp_path: Path) -> None:
    put(
        tmp_path / "lake",
        cluster(
            job(end=1), job("2", end=48.05, state="FAILED"), finding(at=47.95),
            job("3", end=71.99, state="FAILED", hosts="n2"), finding("n2", at=72.01),
            job("4", end=90, state="FAILED", hosts="n3"), finding("n3", at=90),
        ),
    )  # fmt: skip
    first, last = (f"{EPOCH + dt.timedelta(seconds=T0 // S, days=day):%F}" for day in (2, 3))
    found = load_window(Lake.open(tmp_path / "lake"), since=first, until=last)
    assert (found.since_ns, found.until_ns) == (T0 + 2 * DAY_NS, T0 + 3 * DAY_NS)
    assert sorted(attribute_failures(found).failures["job"]) == ["2", "3"]
    assert said(found).records["findings"] == 0


def test_lemons_use_later_job_ends_and_findings_without_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = job("late", end=30, hours=20)
    put(
        tmp_path / "lake",
        cluster(
            job(end=5, state="FAILED"), finding(at=5, cluster="", code="XID 79"), late,
            job("2", end=40, hosts="n2"),
        ),
    )  # fmt: skip
    until = f"{EPOCH + dt.timedelta(seconds=T0 // S, days=1):%F}"
    assert main(["fleet", "lemons", str(tmp_path / "lake"), "--until", until, "--json"]) == 0
    (node,) = json.loads(capsys.readouterr().out)["ranking"]
    assert (node["node"], node["failures"], node["xid_cnt"]) == ("n1", 1, 1)
    assert node["node_days"] == pytest.approx(14 / 24)  # of the time since the first record


def test_records_without_a_cluster_belong_to_the_only_one(tmp_path: Path) -> None:
    """Of one node, not of two; where there are two clusters nobody knows of which."""
    seen = NodeSeen(t_ns=T0, cluster="c", node="n1", kind="", gpus=8, rack="", pod="")
    nameless = [
        finding(at=24, cluster="", code="XID 79"), outage("n1", 24, 3, ""),
        Repair(t_ns=T0 + 25 * HOUR, cluster="", node="n1", kind="ticket", part="", detail=""),
    ]  # fmt: skip
    ran = [job(end=24, hours=20, state="NODE_FAIL"), job("2", end=200)]
    put(tmp_path / "one", cluster(*ran, seen, *nameless))
    found = load_window(Lake.open(tmp_path / "one"))
    assert node_inventory(found)["cluster"].to_list() == ["c"]
    (node,) = rows(said(found), "lemons")
    assert (node["xid_cnt"], node["tickets"], node["out_count"]) == (1, 1, 1)
    put(tmp_path / "two", cluster(*both(ran), seen, *nameless))
    with pytest.raises(UsageError, match="c, d"):
        load_window(Lake.open(tmp_path / "two"))
    assert not len(load_window(Lake.open(tmp_path / "two"), cluster="c").findings.collect())
    put(tmp_path / "twice", cluster(*ran, msgspec.structs.replace(ran[0], cluster=""), *nameless))
    with pytest.raises(UsageError, match="c, '' "):
        load_window(Lake.open(tmp_path / "twice"))
    found = load_window(Lake.open(tmp_path / "twice"), cluster="c")
    assert sorted(found.jobs.collect()["cluster"]) == ["c", "c"]
    assert set(found.outages.collect()["cluster"]) == {"c"}
