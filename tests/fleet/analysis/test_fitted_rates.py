"""Fitted rates of a cluster in plans, and rates that cannot be measured."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet.poisson_jobs import poisson_jobs
from tests.fleet.small_clusters import DAY_NS, HOUR, T0, cluster, finding, job

from outlast.atomic_files import write_new
from outlast.cli.main import main
from outlast.errors import LakeError, UsageError
from outlast.fleet.analysis.confidence_intervals import estimate_share
from outlast.fleet.analysis.fitted_rates import CauseShare, FittedRates, fit_rates
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window, parse_flag_time
from outlast.fleet.rates_file import RatesSource, format_rates
from outlast.fleet.synth import synthetic_cluster
from outlast.log_records import NodeSeen, Outage
from outlast.plan.model.scenario import scenario_of

SOURCE = RatesSource('a "lake"\x7f', "d1")


def outage(node: str, *, at: float, hours: float | None) -> Outage:
    begun = T0 + round(at * HOUR)
    until = None if hours is None else begun + round(hours * HOUR)
    return Outage(t_ns=begun, cluster="c", node=node, until_ns=until, symptom="other", detail="")


def large(name: str, **more: object):
    return job(name, gpus=256, nodes=32, hosts="n[1-32]", **more)


def test_a_plan_takes_what_was_measured_on_a_synthetic_cluster(tmp_path: Path) -> None:
    tables, truth = synthetic_cluster.make_cluster("rsc1", 14, seed=3, nodes=512)
    found = fit_rates(tables)
    assert found.rate.basis == "jobs above 128 GPUs" and found.rate.failures >= 10
    path = tmp_path / "rates.toml"
    write_new(path, format_rates(found, SOURCE))
    told = scenario_of({"gpus": "1024", "rates": str(path)})
    assert told.failures.name == SOURCE.lake
    assert told.failures.per_gpu_s == pytest.approx(
        found.rate.per_1000_node_days / 1000 / 86_400 / 8
    )
    assert told.failures.weight_failures <= found.rate.failures
    assert told.failures.at(0.01) < truth.r_f_counted / 86_400 / 8 < told.failures.at(0.99)
    assert told.gpus_per_node == 8 and told.repair_s > 600
    assert told.transient + told.fatal < 0.5
    shares = tomllib.loads(path.read_text())["causes"]
    assert sum(shares.values()) == pytest.approx(1, abs=1e-4)


def test_outages_give_repair_times_and_failure_widths() -> None:
    """Three failures: of one node that went away, of one that did not, of half of all nodes."""
    found = fit_rates(
        cluster(
            large("1", end=24, hours=24, state="NODE_FAIL", failed_node="n1"),
            large("2", end=48, hours=24, state="NODE_FAIL", failed_node="n2"),
            large("3", end=72, hours=24, state="NODE_FAIL", failed_node="n1"),
            outage("n1", at=24.01, hours=10),
            outage("n2", at=120, hours=20),  # long after
            *(outage(f"n{nth}", at=72, hours=None) for nth in range(1, 17)),
        )
    )
    assert (
        found.rate.basis == "all jobs on GPUs"
        and "fewer than 10: smaller jobs were included" in found.notes[0]
    )
    assert found.measured["transient"].count == found.measured["fatal"].count == 1
    assert found.measured["transient"].value == pytest.approx(1.5 / 4)
    assert found.scenario["repair"] == f"{round((10 + 20 + 16 * 168) / 2 * 3600)}s"


def test_without_jobs_the_rate_is_of_outages() -> None:
    nodes = [
        NodeSeen(t_ns=T0, cluster="c", node=f"n{nth}", kind="", gpus=4, rack="", pod="")
        for nth in range(20)
    ]
    found = fit_rates(cluster(*nodes, *(outage(f"n{nth}", at=nth, hours=6) for nth in range(4))))
    assert (found.rate.basis, found.rate.failures, found.node_gpus) == ("outages", 4, 4)
    assert found.rate.node_days == pytest.approx(200 - 1)
    assert found.rate.per_gpu_second == pytest.approx(4 / 199 / 4 / 86_400)
    assert "transient" not in found.scenario and "queue" not in found.measured
    assert found.causes == [CauseShare("other", 4, 1.0)]
    provenance = tomllib.loads(format_rates(found, SOURCE))["provenance"]
    assert provenance["failure"] == "start of an outage, since no job failed"


def test_without_jobs_lemons_are_ranked_by_outages() -> None:
    """Without them a plan of such a cluster had none."""
    nodes = [
        NodeSeen(t_ns=T0, cluster="c", node=f"n{nth}", kind="", gpus=4, rack="", pod="")
        for nth in range(20)
    ]
    bad = [outage("n1", at=10 * nth, hours=1) for nth in range(8)]
    found = fit_rates(cluster(*nodes, *bad, outage("n2", at=5, hours=1)))
    assert found.measured["lemons"].count == 1 and found.scenario["lemons"] == 0.05
    assert found.measured["lemon-factor"].value > 10


def test_no_failure_at_all_is_half_of_one() -> None:
    found = fit_rates(poisson_jobs(2, per_1000_node_days=1e-6, jobs=100))
    assert (found.rate.failures, found.rate.weight_failures) == (0, 0.5)
    assert found.rate.per_gpu_second == pytest.approx(0.5 / found.rate.node_days / 8 / 86_400)
    assert found.rate.low_per_gpu_second < found.rate.per_gpu_second
    assert any("no outages are known" in note for note in found.notes)


def test_nothing_is_nothing_to_measure() -> None:
    with pytest.raises(LakeError, match="nothing to measure"):
        fit_rates(cluster())
    with pytest.raises(LakeError, match="nothing to measure"):
        fit_rates(cluster(job(gpus=0), finding()))


@cache
def one_outage() -> FittedRates:
    return fit_rates(cluster(job("1", hours=30, end=60), outage("n1", at=2, hours=1)))


@settings(max_examples=25)
@given(st.text(st.characters(exclude_characters="/\0"), max_size=20))
def test_whatever_a_lake_is_called_its_file_can_be_read(name: str) -> None:
    odd = CauseShare(name, 1, 1.0)
    told = msgspec.structs.replace(one_outage(), causes=[odd], notes=[name])
    read = tomllib.loads(format_rates(told, RatesSource(f"dir/{name}\udcff", "d")))
    printed = name.encode(errors="replace").decode()
    assert read["name"] == f"{printed}?" and read["causes"] == {printed: 1.0}
    assert read["provenance"]["notes"] == printed
    assert read["failures"]["failures"] == 1


def test_a_share_is_never_certain() -> None:
    assert estimate_share(0, 9) == (0.05, 0.0, pytest.approx(0.231, abs=1e-3))
    assert estimate_share(9, 9).value < 1 and estimate_share(9, 9).high == pytest.approx(1)


def test_times_of_a_window() -> None:
    assert parse_flag_time("--since", "2024-05-01") == 1_714_521_600 * 10**9
    assert parse_flag_time("--since", "2024-05-01T02:00+02:00") == 1_714_521_600 * 10**9
    for text_ in ("yesterday", "2024-13-01", ""):
        with pytest.raises(UsageError, match=f"--since {text_}"):
            parse_flag_time("--since", text_)


SACCT = "JobID|User|JobName|State|Submit|Start|End|NNodes|NodeList|AllocTRES\n" + "".join(
    f"{nth}|u|train|{state}|2024-05-{day:02d}T00:00:00|2024-05-{day:02d}T00:00:00|"
    f"2024-05-{day:02d}T20:00:00|32|n[01-32]|billing=1,gres/gpu=256,node=32\n"
    for nth, (day, state) in enumerate([(1, "COMPLETED"), (2, "NODE_FAIL"), (3, "COMPLETED")])
)


@pytest.fixture
def lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    log = tmp_path / "sacct.txt"
    log.write_text(SACCT)
    made = tmp_path / "lake"
    assert main(["fleet", "ingest", str(made), str(log)]) == 0
    capsys.readouterr()
    return made


def test_the_command(lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rates.toml"
    assert main(["fleet", "fit", str(lake), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rate"]["failures"] == 1
    assert main(["plan", "ettr", "--gpus", "1024", "--rates", str(out), "--json"]) == 0
    assert "lake: 1 failure in" in json.loads(capsys.readouterr().out)["failures"]
    provenance = tomllib.loads(out.read_text())["provenance"]
    assert len(provenance["digest"]) == 32 and provenance["lake"] == str(lake)
    assert main(["fleet", "fit", str(lake)]) == 0
    assert tomllib.loads(capsys.readouterr().out)["failures"]["failures"] == 1
    assert main(["fleet", "fit", str(lake), "--out", str(out)]) == 2  # overwrites nothing
    assert "exists already" in capsys.readouterr().err
    assert main(["fleet", "fit", str(lake), "--out", str(tmp_path / "no" / "such")]) == 2
    assert main(["fleet", "fit", str(tmp_path)]) == 1
    assert "is no lake" in capsys.readouterr().err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lake", "rates.toml", "sacct.txt"]


def test_ingested_logs_give_the_rates_of_the_tables_behind_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the text of accounting and health logs to a rate, and straight from memory."""
    made, lake = tmp_path / "made", tmp_path / "lake"
    shape = ["--shape", "rsc1", "--days", "8", "--seed", "1", "--nodes", "256"]
    assert main(["fleet", "synth", str(made), *shape]) == 0
    logs = [str(made / name) for name in ("sacct.txt", "health.jsonl", "nodes.csv", "outages.csv")]
    assert main(["fleet", "ingest", str(lake), *logs]) == 0
    capsys.readouterr()
    assert main(["fleet", "fit", str(lake), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    direct = fit_rates(synthetic_cluster.make_cluster("rsc1", 8, seed=1, nodes=256)[0])
    assert told["rate"]["failures"] == direct.rate.failures > 0
    assert told["rate"]["node_days"] == pytest.approx(direct.rate.node_days, rel=1e-3)
    assert told["causes"] == msgspec.to_builtins(direct.causes)
    assert told["scenario"]["repair"] == direct.scenario["repair"]


def test_a_window_counts_jobs_that_end_after_it(lake: Path) -> None:
    opened = Lake.open(lake)
    whole = fit_rates(load_window(opened))
    assert whole.until_ns - whole.since_ns == 2 * DAY_NS + 1  # from the first end to the last
    half = fit_rates(load_window(opened, "2024-05-02", "2024-05-03T10:00"))
    assert half.rate.failures == 1
    assert half.rate.node_days == pytest.approx(32 * 30 / 24)
    first = load_window(opened, "2024-05-01", "2024-05-02")  # nothing of the second day began in it
    assert first.jobs.collect()["state"].to_list() == ["COMPLETED"]
    with pytest.raises(LakeError, match="has nothing from"):
        load_window(opened, "2020-01-01", "2020-02-01")
    with pytest.raises(UsageError, match="is not before"):
        load_window(opened, "2024-05-03", "2024-05-02")


def test_a_trace_of_faults_counts_from_its_day_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not from its first fault on: nothing failed before that."""
    log, made, out = tmp_path / "faults.json", tmp_path / "lake", tmp_path / "rates.toml"
    times = [("n1", 4.0, "fault_start"), ("n1", 5.0, "fault_end"), ("n2", 9.0, "fault_start"),
             ("n2", 10.0, "fault_end")]  # fmt: skip
    events = [{"node_id": n, "event_time": t, "event_type": kind} for n, t, kind in times]
    log.write_text(json.dumps(events))
    asked = ["--nodes", "4", "--gpus-per-node", "8", "--epoch", "2024-03-30"]
    assert main(["fleet", "ingest", str(made), str(log), *asked]) == 0
    assert main(["fleet", "fit", str(made), "--out", str(out)]) == 0
    assert "2 in 38 node-days of outages" in capsys.readouterr().out
    told = scenario_of({"gpus": "3200", "rates": str(out)})
    assert told.failures.per_gpu_s == pytest.approx(2 / 38 / 8 / 86_400, rel=1e-6)
    assert told.repair_s == 86_400 and "transient" in told.assumed
