"""Exposure of nodes: any size, shared or whole, listed or not, in any spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fleet.job_attempts import at_ns, attempt, of, put
from tests.fleet.sacct_log import HEADER, row
from tests.fleet.small_clusters import T0, cluster, finding, job

from outlast.cli.main import main
from outlast.fleet.analysis.exposure import (
    attempts,
    dominant_attempts,
    gpus_per_node,
    inventory_notes,
    job_node_days,
    node_inventory,
)
from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.failure_rates import failure_rate, mttf
from outlast.fleet.analysis.job_runs import node_fails
from outlast.fleet.analysis.lemons import rank_lemons
from outlast.fleet.analysis.outages import outage_rate, outages_by_symptom, repair_time
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window
from outlast.log_records import NodeSeen, Outage


def _outage(node: str, hours: float = 2.0, at: float = 24.0) -> Outage:
    begun = at_ns(at)
    return Outage(t_ns=begun, cluster="c", node=node, until_ns=begun + round(hours * 3600e9),
                  symptom="other", detail="")  # fmt: skip


def _whole(name: str, nodes: int, each: int, **more: object) -> object:
    return job(
        name, end=48, hours=48, nodes=nodes, gpus=nodes * each, hosts=f"n[1-{nodes}]", **more
    )


@pytest.mark.parametrize("each", [2, 4, 8, 16])
def test_one_over_n_is_projected_for_nodes_of_any_size(each: int) -> None:
    """On nodes of 4 GPUs it was off by 2: 8 were assumed."""
    jobs = [
        _whole(str(n), 100, each, state="NODE_FAIL" if n < 20 else "COMPLETED") for n in range(100)
    ]
    found = cluster(*jobs)  # type: ignore[arg-type]
    assert gpus_per_node(found) == (each, "jobs")
    (projected,) = mttf(found, attribute_failures(found), above_gpus=64)["projected_h"].to_list()
    assert projected == pytest.approx(48 * 100 / 20)


def test_node_lists_take_precedence_over_jobs_for_gpus_per_node() -> None:
    seen = [NodeSeen(t_ns=T0, cluster="c", node=f"n{n}", kind="", gpus=4, rack="", pod="")
            for n in range(3)]  # fmt: skip
    assert gpus_per_node(cluster(*seen, _whole("1", 2, 2))) == (4, "nodes")  # type: ignore[arg-type]
    assert gpus_per_node(cluster()) == (8, "assumed")
    odd = [job(str(n), end=24, hours=24, gpus=4) for n in range(50)]
    assert gpus_per_node(cluster(*odd, job("odd", hours=0.1, gpus=900))) == (4, "jobs")


def test_jobs_with_a_gpu_each_share_their_node() -> None:
    """A 1-GPU job counted as a whole node: 308 node-days a day on 301 nodes."""
    small = [job(f"s{n}", end=24, hours=24, gpus=1, hosts="n1") for n in range(8)]
    found = cluster(*small, _whole("big", 4, 8), days=2)  # type: ignore[arg-type]
    assert job_node_days(found)["node_days"].to_list() == pytest.approx([5.0, 4.0])
    assert attempts(found).collect()["node_days"].sum() == pytest.approx(9.0)


def test_nodes_of_two_sizes_count_by_their_own() -> None:
    """Without a list, partitions tell the sizes; with one, the nodes themselves."""
    mixed = [
        job("a", end=24, hours=24, nodes=2, gpus=8, hosts="a[1-2]", partition="a100"),
        job("b", end=24, hours=24, nodes=2, gpus=16, hosts="b[1-2]", partition="h100"),
    ]
    assert attempts(cluster(*mixed)).collect()["held_nodes"].to_list() == [2.0, 2.0]
    seen = [
        NodeSeen(t_ns=T0, cluster="c", node=f"{kind}{n}", kind="", gpus=gpus, rack="", pod="")
        for kind, gpus in (("a", 4), ("b", 8)) for n in (1, 2)
    ]  # fmt: skip
    half = job("c", end=24, hours=24, gpus=2, hosts="a1", partition="h100")
    listed = cluster(*mixed, half, *seen)
    assert attempts(listed).collect()["held_nodes"].to_list() == [2.0, 2.0, 0.5]


def test_nodes_that_ran_jobs_are_there_though_nothing_happened_to_them() -> None:
    """Only nodes with an outage were taken for the fleet: rates too high, and no lemon found."""
    ran = [attempt(str(n), 0, 24 * 28, nodes=50, gpus=400, hosts="n[001-050]") for n in range(2)]
    away = [_outage("n007", at=24 * day) for day in range(1, 9)]
    made = of(*ran, *away)
    assert len(node_inventory(made)) == 50 and not inventory_notes(made)
    assert outage_rate(made).per_1000_node_days == pytest.approx(1000 * 8 / (50 * 28), rel=0.01)


def test_gaps_of_a_numbering_are_nodes_that_had_nothing() -> None:
    named = [*range(1, 60, 2), 60]
    away = [_outage(f"n{n:03d}") for n in named]
    away += [_outage("n007", at=24 * day) for day in range(2, 14)]
    made = of(*away)
    assert len(node_inventory(made)) == 60
    (note,) = inventory_notes(made)
    assert "no log lists the nodes: 31 nodes named" in note and "29 in the gaps" in note
    ranking = rank_lemons(made, node_fails(made), by="outages")
    assert len(ranking) == 60
    assert ranking.filter("lemon")["node"].to_list() == ["n007"]


def test_sparse_node_numbers_do_not_imply_an_inventory() -> None:
    made = of(*(_outage(f"r{n}") for n in (101, 3507, 9932)))
    assert len(node_inventory(made)) == 3
    (note,) = inventory_notes(made)
    assert "rates are too high and lemons are missed" in note and "gaps" not in note


def test_one_damaged_record_moves_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NNodes 999999999 with a list that cannot be read made r_f 0.00."""
    log = tmp_path / "sacct.txt"
    rows = [
        row(jobid=str(n), nnodes="32", nodelist="n[01-32]", alloctres="gres/gpu=256,node=32",
            state="NODE_FAIL" if n < 5 else "COMPLETED")
        for n in range(20)
    ]  # fmt: skip
    damaged = [
        row(jobid="90", nnodes="999999999", nodelist="n[1-", alloctres="gres/gpu=256"),
        row(jobid="91", alloctres="gres/gpu=99999999"),
        row(jobid="92", nnodes="150000", nodelist="n[1-", alloctres="gres/gpu=1200000"),
        row(jobid="93", nnodes="32", nodelist="n[1-32000]", alloctres="gres/gpu=256"),
    ]
    log.write_text("\n".join([HEADER, *rows, *damaged, ""]))
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(log)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 more nodes or GPUs than any cluster has" in out or "damaged record" in out
    said: list[str] = []
    found = load_window(Lake.open(tmp_path / "lake"), "2024-05-17", notes=said)
    assert any("1 job left out" in one and "150,000" in one for one in said)
    rate = failure_rate(found, attribute_failures(found))
    assert rate.attempts == 21
    assert rate.per_1000_node_days == pytest.approx(1000 * 5 / (21 * 32 / 24))


def test_one_job_on_which_all_rates_rest_is_named() -> None:
    many = [job(str(n), end=48, hours=48, hosts=f"n{n}") for n in range(20)]
    assert not dominant_attempts(cluster(*many))
    large = job("77", end=48, hours=48, nodes=400, gpus=3200, hosts="x[1-400]")
    (note,) = dominant_attempts(cluster(*many, large))
    assert "job 77 alone holds 95 % of all node-days" in note


def test_a_node_in_two_spellings_is_one(tmp_path: Path) -> None:
    put(
        tmp_path / "lake",
        cluster(
            job("1", end=2, state="FAILED", hosts="n1"), job("2", end=4, hosts="n2"),
            job("3", end=5, hosts="n3.b.org"),
            finding("n1.example.org", at=2), finding("n2.a.org", at=4), finding("n2.b.org", at=4),
            finding("n3", at=5), finding("10.0.0.1", at=5),
        ),
    )  # fmt: skip
    said: list[str] = []
    found = load_window(Lake.open(tmp_path / "lake"), notes=said)
    assert attribute_failures(found).failures["job"].to_list() == ["1"]
    names = set(found.findings.collect()["node"])
    assert names == {"n1", "n2.a.org", "n2.b.org", "n3.b.org", "10.0.0.1"}
    assert any("2 names of nodes could be several (n2.a.org)" in one for one in said)
    assert any("2 nodes written in two ways" in one and "n1.example.org is n1" in one
               for one in said)  # fmt: skip


def test_a_node_in_capitals_is_the_node_of_its_jobs(tmp_path: Path) -> None:
    put(
        tmp_path / "lake",
        cluster(
            job("1", end=2, state="FAILED", hosts="n1"), job("2", end=4, hosts="n2"),
            job("3", end=5, hosts="N2"), job("4", end=5, hosts="GPU4"),
            finding("N1", at=2), finding("N3.Example.org", at=2), finding("gpu4.example.org", at=2),
            finding("n2.example.org", at=4),
        ),
    )  # fmt: skip
    said: list[str] = []
    found = load_window(Lake.open(tmp_path / "lake"), notes=said)
    assert attribute_failures(found).failures["job"].to_list() == ["1"]
    names = set(found.findings.collect()["node"])
    assert names == {"n1", "N3.Example.org", "GPU4", "n2.example.org"}
    assert any("1 name of nodes could be several (n2.example.org)" in one for one in said)
    assert any("2 nodes written in two ways" in one and "N1 is n1" in one for one in said)


def test_an_outage_that_ends_before_it_begins_is_no_repair_time() -> None:
    """One end in a wrong year made the mean of repairs negative."""
    wrong = Outage(t_ns=at_ns(48), cluster="c", node="n9", until_ns=at_ns(-2e5), symptom="other",
                   detail="")  # fmt: skip
    made = of(*(_outage(f"n{n}", hours=2) for n in range(4)), wrong)
    assert repair_time(made).mean_s == pytest.approx(7200)
    assert outages_by_symptom(made)["median_h"].to_list() == [2.0]
