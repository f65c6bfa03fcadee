"""Evidence for lemon nodes, suspected parts, and its section in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.job_attempts import at_ns, attempt, of, put

from outlast.cli.main import main
from outlast.errors import EXIT_DONE
from outlast.fleet.analysis.failure_attribution import attribute_failures
from outlast.fleet.analysis.lemon_evidence import UNKNOWN, lemon_evidence, suspected_parts
from outlast.fleet.record_tables import Tables
from outlast.fleet.report.fleet_report import FleetReport, build_report, render_page
from outlast.log_records import Finding, JobEnded, Record, Repair


def _finding(node: str, hours: float, **more: Any) -> Finding:
    said: dict[str, Any] = {
        "t_ns": at_ns(hours), "cluster": "c", "node": node, "check": "xid", "severity": "now",
        "symptom": "gpu-memory", "code": "XID 79", "device": "0000:3b:00.0", "detail": "",
    }  # fmt: skip
    return Finding(**{**said, **more})


def _repair(node: str, hours: float, kind: str, part: str) -> Repair:
    return Repair(t_ns=at_ns(hours), cluster="c", node=node, kind=kind, part=part, detail="")  # type: ignore[arg-type]


def _fleet(days: int = 28, bad: range = range(20, 28)) -> list[JobEnded]:
    """Of 40 nodes n7 breaks on the `bad` days."""
    return [
        attempt(f"{node}-{day}", 24 * day, 24 * day + 23, hosts=f"n{node}",
                state="NODE_FAIL" if node == 7 and day in bad else "COMPLETED")
        for node in range(40) for day in range(days)
    ]  # fmt: skip


FOUND: list[Record] = [
    *(_finding("n7", 24 * day + 23) for day in range(20, 25)),
    _finding("n7", 24 * 26 + 23, symptom="ib-link", code="", device="mlx5_0/1"),
    _finding("n7", 24 * 22 + 5, severity="healthy", symptom="thermal"),
    _finding("n3", 24 * 22 + 5, code="XID 48"),
]


def _why(made: Tables, *names: str) -> list[dict[str, Any]]:
    import polars as pl

    nodes = pl.DataFrame({"cluster": ["c"] * len(names), "node": list(names)},
                         schema={"cluster": pl.String, "node": pl.String})  # fmt: skip
    return lemon_evidence(made, attribute_failures(made), nodes).to_dicts()


def test_the_top_symptom_code_device_and_part() -> None:
    one, other, third = _why(of(*_fleet(), *FOUND), "n7", "n3", "n9")
    assert (one["symptom"], one["code"], one["device"]) == ("gpu-memory", "XID 79", "0000:3b:00.0")
    assert (one["part"], one["exchanged"]) == ("gpu", False)
    assert one["why"].startswith("gpu-memory (XID 79) at 5 of 6 failures with a cause")
    assert "5 of 5 findings on 0000:3b:00.0" in one["why"]
    assert other["why"].startswith("nothing was found at its failures; gpu-memory (XID 48)")
    assert (third["symptom"], third["part"]) == ("", UNKNOWN)


def test_replaced_parts_outweigh_suggested_ones() -> None:
    swapped = [_repair("n7", 500, "ticket", "DIMM"), _repair("n7", 600, "swap", "DIMM")]
    (one,) = _why(of(*_fleet(), *FOUND, *swapped), "n7")
    assert (one["part"], one["exchanged"]) == ("dimm", True)
    assert "exchanged: dimm; 1 ticket" in one["why"]
    (one,) = _why(of(*_fleet(), *FOUND, swapped[0], _repair("n7", 9, "ticket", "?")), "n7")
    assert (one["part"], one["exchanged"]) == ("dimm", False)


def test_table_ii() -> None:
    made = of(*_fleet(), *FOUND, _repair("n9", 600, "swap", "DIMM"))
    import polars as pl

    nodes = pl.DataFrame({"cluster": ["c"] * 3, "node": ["n7", "n3", "n9"]})
    rows = suspected_parts(lemon_evidence(made, attribute_failures(made), nodes)).to_dicts()
    assert [(one["part"], one["lemons"], one["exchanged"]) for one in rows] == [
        ("gpu", 2, 0), ("dimm", 1, 1),
    ]  # fmt: skip
    assert [one["paper"] for one in rows] == [0.282, 0.205]
    assert not len(suspected_parts(lemon_evidence(made, attribute_failures(made), nodes.clear())))


def _report(made: Tables) -> tuple[FleetReport, dict[str, Any]]:
    told = build_report(made, "a lake")
    assert "<h1>" in render_page(told, {})
    return told.report, {one.key: one for one in told.report.sections}


def test_a_lemon_of_earlier_days_of_the_window_is_in_the_report() -> None:
    """The report covered the last 28 days of whatever window it was asked for."""
    _, early = _report(of(*_fleet(200, range(10, 20)), days=200))
    (node,) = [one for one in early["lemons"].rows if one["called"]]
    assert (node["node"], node["called"], node["failures"]) == ("n7", "earlier", 0)
    assert node["past_failures"] == 10
    assert any("1 node failed as often before" in note for note in early["lemons"].notes)
    assert early["parts"].rows[0]["part"] == UNKNOWN
    _, late = _report(of(*_fleet(200, range(190, 200)), days=200))
    assert [one["called"] for one in late["lemons"].rows if one["called"]] == ["lemon"]


def test_the_json_has_the_series_of_each_figure() -> None:
    whole, sections = _report(of(*_fleet(), *FOUND))
    series = sections["rolling"].series
    assert series and {"day", "cause", "per_1000_node_days"} <= series[0].keys()
    steps = [one for one in sections["signals"].series if one["signal"] == "xid_cnt"]
    assert steps[-1]["of_largest"] == 1 and steps[-1]["nodes_share"] == 1
    values = {one.key: one.value for one in whole.headlines}
    assert values["lemons"] == 1 and isinstance(values["ended"], float)
    assert isinstance(values["lost"], float)


def test_no_gpu_time_is_not_0_percent_of_it() -> None:
    """It said that 0 % of GPU time was lost, of zero hours."""
    bare = [attempt(str(n), n, n + 1, gpus=0, hosts="n1", state="NODE_FAIL" if n < 4 else "FAILED")
            for n in range(8)]  # fmt: skip
    whole, _ = _report(of(*bare))
    (ended,) = [one for one in whole.headlines if one.key == "ended"]
    assert (ended.figure, ended.value) == ("50 %", 0.5)
    assert ended.description.startswith("of attempts") and "no attempt held GPUs" in ended.rests_on


def test_a_few_hours_lost_are_not_0() -> None:
    short = [attempt(str(n), n, n + 0.05, gpus=1, hosts="n1", state="NODE_FAIL") for n in range(3)]
    whole, _ = _report(of(*short, attempt("x", 0, 48, hosts="n2")))
    (lost,) = [one for one in whole.headlines if one.key == "lost"]
    assert lost.figure == "0.15" and lost.value == pytest.approx(0.15)


def test_ticks_of_small_numbers_are_not_all_0() -> None:
    import matplotlib as mpl
    import polars as pl

    mpl.use("svg")
    from matplotlib.figure import Figure

    from outlast.fleet.report import report_figures

    found = pl.DataFrame({"bucket": [1, 2], "first_gpu_s": [0.1, 0.2], "second_gpu_s": [0.0, 0.1]})
    figure = Figure()
    report_figures.draw_goodput(found, figure)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert len(set(texts)) == len(texts) > 2


def test_the_command_prints_the_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path / "lake", of(*_fleet(), *FOUND))
    assert main(["fleet", "lemons", str(tmp_path / "lake")]) == EXIT_DONE
    out = " ".join(capsys.readouterr().out.split())
    assert "gpu-memory (XID 79) at 5 of 6 failures with a cause" in out and "likely gpu" in out
    assert main(["fleet", "lemons", str(tmp_path / "lake"), "--json"]) == EXIT_DONE
    ranking = json.loads(capsys.readouterr().out)["ranking"]
    assert (ranking[0]["part"], ranking[0]["code"], ranking[1]["why"]) == ("gpu", "XID 79", "")


def test_findings_that_end_early_are_noted() -> None:
    """After the last health log FAILED jobs are a user's, and rates too low."""
    jobs = [attempt(str(n), n, n + 1, hosts="n1") for n in range(24 * 28)]
    early = [_finding("n1", 2 * n, severity="warn") for n in range(100)]
    whole, _ = _report(of(*jobs, *early))
    assert any("health findings are known from" in note for note in whole.notes)
    spread = [_finding("n1", 6 * n, severity="warn") for n in range(4 * 28)]
    whole, _ = _report(of(*jobs, *spread))
    assert not any("health findings are known" in note for note in whole.notes)
