"""Pages of a lake: the figures of `outlast fleet`, nodes, rates, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from msgspec.structs import replace
from tests.web.conftest import serving
from tests.web.test_page_server import get

from outlast.cli.main import main
from outlast.cli.reports.view import LAKE
from outlast.fleet.analysis.fitted_rates import fit_rates
from outlast.fleet.lake import MANIFEST, Lake
from outlast.fleet.lake_selection import load_window
from outlast.fleet.record_tables import DAY_NS, tables
from outlast.fleet.report.fleet_report import format_cell
from outlast.fleet.report.report_sections import ReportColumn, ReportFacts
from outlast.log_records import Finding, JobEnded, Outage
from outlast.plan.model.scenario import scenario_of
from outlast.web.lake.lake_page import render_node, render_section
from outlast.web.lake.lake_pages import planner_query
from outlast.web.lake.lake_query import LakeQuery
from outlast.web.lake.node_history import EVENTS_MAX, node_history
from outlast.web.planner_query import given_texts, parse_query

pytestmark = pytest.mark.process
HOSTILE = "<script>alert('x')</script>\x1b[31m\"&amp;\u202e"
TRACE = Path(os.environ.get("OUTLAST_TRACES", "no-traces")) / "infinitehbd"


def ingested(root: Path, *flags: str) -> Path:
    logs, lake = root / "logs", root / "lake"
    assert main(["fleet", "synth", str(logs), "--days=6", "--nodes=64", *flags]) == 0
    paths = [path for path in sorted(logs.iterdir()) if path.suffix in (".txt", ".jsonl", ".csv")]
    assert main(["fleet", "ingest", str(lake), *map(str, paths)]) == 0
    return lake


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ingested(tmp_path_factory.mktemp("fleet"), "--shape=rsc1", "--seed=4")


@pytest.fixture(scope="module")
def link(lake: Path) -> Iterator[str]:
    with serving(lake) as address:
        yield address


def page(link: str, path: str) -> tuple[int, str]:
    answered = get(link, path)
    return answered.status, unescape(answered.body.decode())


@pytest.mark.parametrize(
    ("query", "flags"),
    [
        ("", ()),
        (
            "since=2024-06-02&until=2024-06-05&partition=learn&above-gpus=16",
            ("--since=2024-06-02", "--until=2024-06-05", "--partition=learn", "--above-gpus=16"),
        ),
    ],
)
def test_the_figures_are_those_of_the_report(
    query: str, flags: tuple[str, ...], lake: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["fleet", "report", str(lake), "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    status, text = page(link, f"/?{query}")
    assert status == 200 and 'role="alert"' not in text
    for one in report["headlines"]:
        assert f"<b>{one['figure']}</b><p>{one['rests_on']}</p>" in text
    for section in report["sections"]:
        columns = [ReportColumn(c["key"], c["said"], c["unit"]) for c in section["columns"]]
        for row in section["rows"]:
            cells = [format_cell(row[column.key], column) for column in columns]
            assert all(cell in text for cell in cells), section["key"]
        assert all(note in text for note in section["notes"])
    assert all(note in text for note in report["notes"])
    for flag in flags:
        assert flag in text
    assert page(link, f"/?{query}") == (status, text)
    assert page(link, f"/report?{query}")[1] in text


@pytest.mark.parametrize(
    ("query", "status", "why"),
    [
        ("since=2031-01-01&until=2031-02-01", 404, "has nothing from 2031-01-01"),
        ("since=2024-06-05&until=2024-06-01", 400, "is not before --until 2024-06-01"),
        ("since=soon", 400, "--since soon: not a date or time"),
        ("partition=" + quote(HOSTILE), 400, "no job of it is in the window, which has learn"),
        ("cluster=nowhere", 400, "--cluster nowhere"),
        ("above-gpus=many", 400, "above-gpus' needs a whole number"),
        ("above-gpus=99999999999", 400, "give a number of GPUs from 0"),
        ("partition=" + "x" * 10_000, 400, "partition has 10,000 characters"),
        ("x" * 10_000 + "=1", 400, "is unknown; known are above-gpus"),
        ("since=a&since=b", 400, "since is given twice"),
        ("since=%00", 400, "not a date or time"),
        ("since=0001-01-01", 400, "--since 0001-01-01: give a year from 1700"),
        ("until=9999-12-31", 400, "--until 9999-12-31: give a year from 1700 to 2249"),
    ],
)
@pytest.mark.parametrize("path", ["/", "/report", "/rates"])
def test_bad_queries_are_refused_in_the_page(
    path: str, query: str, status: int, why: str, link: str
) -> None:
    answered = get(link, f"{path}?{query}")
    text = answered.body.decode()
    assert (answered.status, answered.headers.get_content_type()) == (status, "text/html"), text
    assert 'role="alert"' in text and why in unescape(text) and len(text) < 60_000
    assert text.count("<script>") <= 1 and "Traceback" not in text


def test_a_node_has_its_records(lake: Path, link: str) -> None:
    facts = ReportFacts(load_window(Lake.open(lake), notes=[]))
    (worst,) = facts.ranking.head(1).iter_rows(named=True)
    _, text = page(link, "/")
    assert f'href="/node?node={worst["node"]}"' in text
    status, text = page(link, f"/node?node={worst['node']}")
    assert status == 200
    findings = facts.tables.findings.collect().filter(node=worst["node"])
    for code, device in findings.select("code", "device").iter_rows():
        assert code in text and device in text
    history = node_history(facts, worst["node"], "rsc1")
    own = sum(event.level == "attributed" for event in history.events)
    assert own >= worst["failures"] and text.count('"attributed"') >= own
    assert sum(count for _, count in history.states) == facts.tables.jobs.collect().filter(
        hosts=worst["node"]
    ).height + sum(worst["node"] in hosts and hosts != worst["node"] for hosts in _expanded(facts))


def _expanded(facts: ReportFacts) -> list[str]:
    from outlast.fleet.host_lists import expand

    lists = facts.tables.jobs.collect()["hosts"].to_list()
    return ["," + ",".join(expand(text)) + "," for text in lists if "[" in text or "," in text]


@pytest.mark.parametrize(
    ("query", "status"),
    [("node=nobody", 404), ("", 400), ("node=" + "n" * 9_000, 400), ("node=..%2f..%2fetc", 404)],
)
def test_unknown_nodes_are_refused(query: str, status: int, link: str) -> None:
    answered = get(link, f"/node?{query}")
    assert answered.status == status and b'role="alert"' in answered.body


def test_hostile_records_are_escaped() -> None:
    hour = 3600 * 10**9
    jobs = [
        JobEnded(
            t_ns=(k + 1) * hour, cluster="", job=HOSTILE, attempt=k, name=HOSTILE, user=HOSTILE,
            account="", partition=HOSTILE, qos=HOSTILE, state="NODE_FAIL", exit_code=1, signal=0,
            submit_ns=k * hour, eligible_ns=k * hour, start_ns=k * hour + 1, nodes=1, gpus=8,
            hosts="n1", excluded="", failed_node="n1", priority=1, restarts=k,
        )
        for k in range(60)
    ]  # fmt: skip
    many = [
        Finding(
            t_ns=k * hour, cluster="", node=HOSTILE, check=HOSTILE, symptom="pcie", severity="now",
            code=HOSTILE, device=HOSTILE, detail=HOSTILE * 100_000 if not k else HOSTILE,
        )
        for k in range(EVENTS_MAX + 20)
    ]  # fmt: skip
    open_outage = Outage(
        t_ns=hour, cluster="", node=HOSTILE, until_ns=None, symptom="other", detail=HOSTILE
    )
    facts = ReportFacts(tables([*jobs, *many, open_outage], 0, 30 * DAY_NS))
    for node in (HOSTILE, "n1"):
        history = node_history(facts, node, "")
        html = render_node(Path(HOSTILE), node, LakeQuery(), history, (0, 30 * DAY_NS))
        assert "<script" not in html and len(html) < 2_000_000
    from outlast.fleet.report.fleet_report import report_sections

    for drawn in report_sections(facts):
        html = render_section(drawn.section, LakeQuery(partition=HOSTILE).node_link)
        assert "<script" not in html


def test_rates_lead_to_the_planner(lake: Path, link: str, tmp_path: Path) -> None:
    query, flags = "since=2024-06-02&above-gpus=16", ["--since=2024-06-02", "--above-gpus=16"]
    answered = get(link, f"/rates?{query}")
    assert answered.status == 303
    texts = given_texts(parse_qsl(urlsplit(answered.headers["location"]).query))
    ours = parse_query(texts).scenario
    file = tmp_path / "rates.toml"
    assert main(["fleet", "fit", str(lake), "--out", str(file), *flags]) == 0
    theirs = scenario_of({"gpus": texts["gpus"], "rates": str(file)})
    assert ours.failures.per_gpu_s == pytest.approx(theirs.failures.per_gpu_s, rel=1e-12)
    assert ours.failures.weight_failures == theirs.failures.weight_failures
    for name in ours.__struct_fields__:
        if name not in ("failures", "assumed"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert get(link, answered.headers["location"]).status == 200


def test_rates_keep_fractions_and_fit_nodes(lake: Path) -> None:
    found = fit_rates(load_window(Lake.open(lake), notes=[]))
    rate = replace(found.rate, weight_failures=1.375)
    odd = replace(found, rate=rate, node_gpus=6, scenario={"gpus-per-node": 6})
    scenario = parse_query(given_texts(parse_qsl(planner_query(odd)))).scenario
    assert scenario.failures.weight_failures == 1.375
    assert scenario.gpus_per_node == 6 and scenario.gpus == 16_380


def test_a_lake_that_changes(lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake, tmp_path / "lake")
    with serving(tmp_path / "lake") as link:
        before = page(link, "/")[1]
        more = tmp_path / "more"
        flags = ("--shape=rsc1", "--days=8", "--nodes=64", "--seed=9")
        assert main(["fleet", "synth", str(more), *flags]) == 0
        assert main(["fleet", "ingest", str(tmp_path / "lake"), str(more / "sacct.txt")]) == 0
        status, after = page(link, "/")
        assert status == 200 and "8.0 days" in after and "8.0 days" not in before
        (damaged, *_) = sorted((tmp_path / "lake").glob("jobs/*/*.parquet"))
        damaged.write_bytes(b"PAR1" + bytes(999) + b"PAR1")
        os.utime(tmp_path / "lake" / MANIFEST)
        status, text = page(link, "/")
        assert status == 404 and f"{damaged} is damaged" in text
        (tmp_path / "lake" / MANIFEST).write_text('{"version": 1}')
        status, empty = page(link, "/")
        assert status == 404 and "holds no records yet" in empty
        (tmp_path / "lake" / MANIFEST).write_text("{")
        assert page(link, "/node?node=x")[0] == 404
        shutil.rmtree(tmp_path / "lake")
        assert page(link, "/")[0] == 404


def test_a_lake_of_several_clusters(tmp_path: Path) -> None:
    log = "JobID|State|Cluster|Start|End|NNodes|NodeList|AllocTRES\n" + "".join(
        f"{k}|COMPLETED|{'ab'[k % 2]}|2024-06-0{k}T00:00:00|2024-06-0{k}T05:00:00|1|n{k % 2}|"
        "gres/gpu=8\n"
        for k in range(1, 9)
    )
    (tmp_path / "sacct.txt").write_text(log)
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(tmp_path / "sacct.txt")]) == 0
    with serving(tmp_path / "lake") as link:
        first = get(link, "/")
        assert first.status == 303 and first.headers["location"] == "/?cluster=a"
        for name in "ab":
            status, text = page(link, f"/?cluster={name}")
            assert status == 200 and f"<option selected>{name}</option>" in text
        assert page(link, "/node?cluster=a&node=n1")[0] == 404
        assert page(link, "/node?cluster=b&node=n1")[0] == 200
        assert page(link, "/?cluster=c")[0] == 400


def test_flags_of_runs_are_refused(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert LAKE == MANIFEST
    assert main(["view", str(lake), "--price-per-hour", "2"]) == 2
    assert "--price-per-hour" in capsys.readouterr().err


@pytest.mark.skipif(not TRACE.is_dir(), reason="the traces are not on this machine")
def test_a_published_trace_of_faults(tmp_path: Path) -> None:
    flags = ["--epoch=2024-03-30", "--nodes=400", "--gpus-per-node=8"]
    log = TRACE / "fault_trace.json"
    assert main(["fleet", "ingest", str(tmp_path / "lake"), str(log), *flags]) == 0
    with serving(tmp_path / "lake") as link:
        status, text = page(link, "/")
        assert status == 200 and "outages in 1000 node-days" in text
        lemon = text.partition('href="/node?node=')[2].partition('"')[0]
        assert page(link, f"/node?node={lemon}")[0] == 200
        assert get(link, "/rates").status == 303
