"""Several clusters in one lake with equal node names."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.fleet.job_attempts import at_ns, attempt, of, put

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, LakeError, UsageError
from outlast.fleet.analysis.fitted_rates import fit_rates
from outlast.fleet.analysis.job_runs import node_fails
from outlast.fleet.analysis.lemon_evidence import drain_commands
from outlast.fleet.analysis.lemons import rank_lemons
from outlast.fleet.flight_recorder.nearby_findings import from_lake
from outlast.fleet.lake import Lake
from outlast.fleet.lake_selection import load_window
from outlast.log_records import Finding, JobEnded


def _jobs(cluster: str, bad: str, days: int = 28) -> list[JobEnded]:
    """Of 30 nodes one breaks every second day."""
    return [
        replace(
            attempt(f"{node}-{day}", 24 * day, 24 * day + 23, hosts=f"n{node}",
                    state="NODE_FAIL" if f"n{node}" == bad and day % 2 else "COMPLETED"),
            cluster=cluster,
        )
        for node in range(30) for day in range(days)
    ]  # fmt: skip


def _finding(cluster: str, node: str, day: int) -> Finding:
    return Finding(
        t_ns=at_ns(24 * day + 23), cluster=cluster, node=node, check="xid", symptom="gpu-memory",
        severity="now", code="XID 79", device="", detail="",
    )  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """In alpha n7 is bad, in beta n9; one log of findings names no cluster."""
    put(
        tmp_path / "lake",
        of(
            *_jobs("alpha", "n7"), *_jobs("beta", "n9", 14), _finding("beta", "n9", 1),
            _finding("", "n7", 3),
        ),
    )  # fmt: skip
    return tmp_path / "lake"


@pytest.mark.parametrize(
    "asked", [["lemons"], ["lemons", "--drain"], ["report", "--json"], ["fit"]]
)
def test_several_clusters_are_never_computed_together(
    lake: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", asked[0], str(lake), *asked[1:]]) == EXIT_USAGE
    captured = capsys.readouterr()
    assert "--cluster" in captured.err and "alpha, beta" in " ".join(captured.err.split())
    assert not captured.out


@pytest.mark.parametrize(("cluster", "bad"), [("alpha", "n7"), ("beta", "n9")])
def test_a_drain_command_names_its_cluster(
    lake: Path, cluster: str, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without -M it drains the healthy namesake where it happens to be run."""
    asked = ["fleet", "lemons", str(lake), "--cluster", cluster]
    assert main([*asked, "--drain"]) == EXIT_DONE
    out = capsys.readouterr().out
    (line,) = [one for one in out.splitlines() if one.startswith("scontrol")]
    assert shlex.split(line)[:5] == ["scontrol", "-M", cluster, "update", f"NodeName={bad}"]
    assert main([*asked, "--json"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["cluster"], found["lemons"], found["nodes"]) == (cluster, 1, 30)
    assert {one["cluster"] for one in found["ranking"]} == {cluster}
    assert any("1 finding of no named cluster left out" in note for note in found["notes"])


def test_the_last_days_are_those_of_the_cluster(lake: Path) -> None:
    """Beta's accounting ends two weeks before alpha's."""
    opened = Lake.open(lake)
    alpha, beta = (load_window(opened, cluster=name) for name in ("alpha", "beta"))
    assert beta.until_ns == at_ns(24 * 13 + 23) + 1 < alpha.until_ns
    assert fit_rates(beta).rate.node_days == pytest.approx(30 * 13 * 23 / 24)  # since the first end


def test_a_cluster_that_is_not_there_is_named(lake: Path) -> None:
    with pytest.raises(UsageError, match=r"gamma: .* has alpha, beta, ''"):
        load_window(Lake.open(lake), cluster="gamma")
    with pytest.raises(LakeError):  # its only record is of another time
        load_window(Lake.open(lake), "2000-01-01", "2000-01-02", cluster="alpha")
    assert len(load_window(Lake.open(lake), cluster="").findings.collect()) == 1


def test_a_hang_is_not_attributed_to_a_node_of_another_cluster(lake: Path) -> None:
    at = _finding("beta", "n9", 1).t_ns
    with pytest.raises(UsageError, match="alpha, beta"):
        from_lake(lake, at)
    assert len(from_lake(lake, at, "beta").findings) == 1
    assert len(from_lake(lake, at, "alpha").findings) == 0


def test_the_share_that_may_be_drained_is_of_each_cluster() -> None:
    """As a part of both, all of it could fall on the small one."""
    made = of(*_jobs("alpha", "n7"), *_jobs("beta", "n9"))
    found = rank_lemons(made, node_fails(made))
    listed = drain_commands(found, share_max=0.02)
    assert {line.split()[2] for line in listed.lines} == {"alpha", "beta"}


def test_a_name_that_is_no_cluster_is_in_no_command() -> None:
    made = of(*_jobs("a; reboot", "n7"))
    listed = drain_commands(rank_lemons(made, node_fails(made)))
    assert (listed.lines, listed.unsafe) == ([], ["n7"])


def test_a_lake_of_replaced_names_drains_nothing(
    lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = lake / "lake.json"
    text = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**text, "anonymous": "0123456789abcdef"}))
    assert main(["fleet", "lemons", str(lake), "--cluster", "alpha", "--drain"]) == EXIT_USAGE
    assert main(["fleet", "lemons", str(lake), "--cluster", "alpha", "--json"]) == EXIT_DONE
    assert "scontrol" not in capsys.readouterr().out


def test_drain_commands_without_a_cluster_name_are_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "lake", of(*_jobs("", "n7")))
    assert main(["fleet", "lemons", str(tmp_path / "lake"), "--drain"]) == EXIT_DONE
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("# no log names the cluster") for line in lines)


def test_a_few_jobs_of_a_wrong_year_do_not_move_the_window(tmp_path: Path) -> None:
    """One row of 2001 made a window of 23 years, and every rate of outages 0.00."""
    put(tmp_path / "lake", of(*_jobs("c", "n7", 60), attempt("old", -9e4, -9e4 + 1, hosts="n1")))
    notes: list[str] = []
    found = load_window(Lake.open(tmp_path / "lake"), notes=notes)
    assert found.since_ns == at_ns(23)
    assert any("1 job from " in note and "--since" in note for note in notes)
    again = load_window(Lake.open(tmp_path / "lake"), since="2013-01-01")
    assert len(again.jobs.collect()) == 30 * 60 + 1
