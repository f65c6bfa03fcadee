"""`outlast fleet lemons`: ranking, evidence and printed drain commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.fleet.job_attempts import attempt, of, put

from outlast.cli.main import main
from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR
from outlast.fleet.record_tables import DAY_NS
from outlast.log_records import Outage


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 60 nodes n7 breaks every third day, and three others once; one job of four dies for no
    reason that is known."""
    made = []
    for node in range(60):
        for day in range(28):
            broke = (node == 7 and day % 3 == 0) or (node in (3, 30, 50) and day == node % 28)
            made.append(
                attempt(f"{node}-{day}", 24 * day, 24 * day + 23, hosts=f"n{node}",
                        state="NODE_FAIL" if broke else "COMPLETED", excluded="n7" if node == 1
                        else "")
            )  # fmt: skip
    made.append(attempt("big", 0, 5, hosts="n[10-13]", nodes=4, gpus=32, state="NODE_FAIL"))
    path = tmp_path_factory.mktemp("lemons") / "lake"
    put(path, of(*made))
    return path


def test_the_lemon_and_its_evidence(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "lemons", str(lake)]) == EXIT_DONE
    out = capsys.readouterr().out
    assert "1 lemon among 60 nodes" in out
    (line,) = [line for line in out.splitlines() if line.startswith("n7 ")]
    assert line.split()[:3] == ["n7", "lemon", "10"]
    (besides,) = [line for line in out.splitlines() if line.startswith("n7: ")]
    assert "excluded by 28 jobs" in besides and "10 single-node failures" in besides
    assert "of 14 failures 1 have no known node" in " ".join(out.split())
    assert "scontrol" not in out


def test_against_the_truth(lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Precision is of those that were called, recall of those that there are."""
    truth = tmp_path / "truth.json"
    truth.write_text('{"lemons": {"n7": 40.0, "n9": 30.0}, "r_f": 0.006}')
    asked = ["fleet", "lemons", str(lake), "--truth", str(truth)]
    assert main(asked) == EXIT_DONE
    said = "of 2 true lemons 1 found, and 0 healthy nodes ranked as lemons, precision 100 %"
    assert said in capsys.readouterr().out
    assert main([*asked, "--json"]) == EXIT_DONE
    score = json.loads(capsys.readouterr().out)["score"]
    assert (score["called"], score["right"], score["true"]) == (1, 1, 2)
    truth.write_text('{"lemons": ["n7"]}')
    assert main(asked) == EXIT_USAGE
    assert "--truth" in capsys.readouterr().err


def test_a_long_name_gives_way_and_no_figure_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With names as of Kubernetes each figure was cut to its first digit; and who asks for the
    first only is told of the others."""
    monkeypatch.setenv("COLUMNS", "80")
    long = "e7b02619-a1fa-4aaa-9e0f-f81b00843e0{}"
    made = [
        attempt(f"{node}-{day}", 24 * day, 24 * day + 23, hosts=long.format(node),
                state="NODE_FAIL" if node < 2 and day > 16 else "COMPLETED")
        for node in range(10) for day in range(28)
    ]  # fmt: skip
    put(tmp_path / "lake", of(*made))
    assert main(["fleet", "lemons", str(tmp_path / "lake"), "--top", "1"]) == EXIT_DONE
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if " lemon   " in line]
    assert line.split()[1:] == ["lemon", "11", "0.05", "220", "1e-22", "25.9"] and "…" not in out
    assert "1 more lemon: --top 2" in out


def test_a_finding_of_today_is_not_when_jobs_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A diagnosis has the time of its file: what is asked of are still the last days with jobs."""
    ran = [attempt(str(day), 24 * day, 24 * day + 23, hosts="n1") for day in range(5)]
    late = Outage(t_ns=ran[-1].t_ns + 400 * DAY_NS, cluster=ran[0].cluster, node="n1",
                  until_ns=None, symptom="other", detail="")  # fmt: skip
    put(tmp_path / "lake", of(*ran, late))
    assert main(["fleet", "lemons", str(tmp_path / "lake"), "--json"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["by"], found["nodes"]) == ("jobs", 1)


def test_drain_is_printed(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "lemons", str(lake), "--drain"]) == EXIT_DONE
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "scontrol" in one]
    assert shlex.split(line)[:5] == ["scontrol", "-M", "c", "update", "NodeName=n7"]


def test_json_has_every_node(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "lemons", str(lake), "--json", "--top", "1"]) == EXIT_DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["lemons"], len(found["ranking"])) == (60, 1, 60)
    assert found["ranking"][0]["node"] == "n7" and found["ranking"][0]["q"] < 0.05
    assert len(found["drain"]) == 1


def test_a_window_of_its_own(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four days before a break are no evidence."""
    assert main(["fleet", "lemons", str(lake), "--days", "4", "--history-days", "4", "--until",
                 "2024-10-08", "--json"]) == EXIT_DONE  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert found["lemons"] == 0 and found["ranking"][0]["node_days"] <= 4


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--days", "0"], EXIT_USAGE),
        (["--days", "30", "--history-days", "10"], EXIT_USAGE),
        (["--fdr", "2"], EXIT_USAGE),
        (["--until", "tomorrow"], EXIT_USAGE),
        (["--until", "1999-01-01"], EXIT_USER_ERROR),
        (["--top", "0"], EXIT_USAGE),
    ],
)
def test_invalid_arguments(lake: Path, more: list[str], code: int) -> None:
    assert main(["fleet", "lemons", str(lake), *more]) == code


def test_no_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "lemons", str(tmp_path)]) == EXIT_USER_ERROR
    assert "is no lake" in " ".join(capsys.readouterr().err.split())


def test_metrics_name_the_lemon_and_rates(lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "fleet.prom"
    assert main(["fleet", "report", str(lake), "--metrics-file", str(file)]) == EXIT_DONE
    found = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in file.read_text().splitlines()
        if not line.startswith("#")
    }
    name = next(name for name in found if name.startswith("outlast_fleet_lemons"))
    cluster = name.partition('"')[2].partition('"')[0]
    assert found[name] == 1
    assert (
        found[f'outlast_fleet_lemon_failures{{cluster="{cluster}",node="n7",partition=""}}'] == 10
    )
    states = [value for name, value in found.items() if name.startswith("outlast_fleet_attempts")]
    assert sum(states) == 60 * 28 + 1
    missing = ["fleet", "report", str(lake), "--metrics-file", str(tmp_path / "no" / "f.prom")]
    assert main(missing) == EXIT_USAGE
