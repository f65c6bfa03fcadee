"""Exported pages of lakes and of the planner: the figures of the served ones, without controls."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from tests.web.conftest import serving
from tests.web.test_lake_page import ingested
from tests.web.test_page_server import get

from outlast.cli.main import main
from outlast.web.lake.lake_export import NODES_MAX, exported_lake
from outlast.web.planner_pages import curves_response, exported_planner, page_response

pytestmark = pytest.mark.process
LINK = re.compile(r' href="([^"]*)"')
ANCHOR = re.compile(r' id="([^"]*)"')


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ingested(tmp_path_factory.mktemp("fleet"), "--shape=rsc1", "--seed=4")


@pytest.fixture(scope="module")
def link(lake: Path) -> Iterator[str]:
    with serving(lake) as address:
        yield address


def assert_alone(html: str) -> None:
    """Assert that a document needs no server, and that its links lead into it."""
    assert "<form" not in html and "<input" not in html and "fetch(" not in html
    anchors = Counter(ANCHOR.findall(html))
    assert set(anchors.values()) <= {1}
    assert {to.removeprefix("#") for to in LINK.findall(html)} <= anchors.keys()
    assert all(to.startswith("#") for to in LINK.findall(html))


@pytest.mark.parametrize("query", ["", "since=2024-06-02&partition=learn&above-gpus=16"])
def test_a_lake_is_that_of_its_page(lake: Path, link: str, tmp_path: Path, query: str) -> None:
    file = tmp_path / "lake.html"
    assert main(["view", str(lake), "--export", str(file), "--query", query]) == 0
    exported = file.read_text()
    assert_alone(exported)
    without_links = re.compile(r"</?a\b[^>]*>")
    served = without_links.sub("", get(link, f"/report?{query}").body.decode())
    assert served in without_links.sub("", exported)
    for text in dict(parse_qsl(query)).values():
        assert f"<td>{text}</td>" in exported


def test_bad_nodes_have_their_histories(
    lake: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["fleet", "report", str(lake), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (rows,) = (one["rows"] for one in report["sections"] if one["key"] == "lemons")
    lemons = [row["node"] for row in rows]
    named = "rsc1-0001"
    exported = exported_lake(lake, f"node={named}")
    names = re.findall(r"<summary>([^<]*)</summary><", exported)
    assert lemons and names == [named, *(name for name in lemons if name != named)][:NODES_MAX]
    for name in names:
        page = get(link, f"/node?node={name}").body.decode()
        (figure,) = re.findall(r"<figure>.*</figure>", page, re.DOTALL)
        rows = re.findall(r'<table class="node-events">.*</table>', page, re.DOTALL)
        assert all(part in exported for part in (figure, *rows))
    assert f'<a href="#node-1">{lemons[0]}</a>' in exported_lake(lake, "")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("node=luck", "no record of this window names node luck"),
        ("partition=luck", "no job of it is in the window"),
        ("luck=1", "'luck' is unknown"),
        ("since=2031-01-01", "is not before --until"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], query: str, why: str
) -> None:
    file = tmp_path / "lake.html"
    assert main(["view", str(lake), "--export", str(file), "--query", query]) in (1, 2)
    assert why in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert not file.exists()


def test_the_first_of_several_clusters_is_named(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    log = tmp_path / "sacct.txt"
    log.write_text(
        "JobID|State|Cluster|Start|End|NNodes|NodeList|AllocTRES\n"
        "1|COMPLETED|<b>|2024-06-01T00:00:00|2024-06-01T05:00:00|1|n1|gres/gpu=8\n"
        "2|COMPLETED|a|2024-06-01T00:00:00|2024-06-01T05:00:00|1|n1|gres/gpu=8\n"
    )
    assert main(["fleet", "ingest", str(lake), str(log)]) == 0
    exported = exported_lake(lake, "")
    assert "<td>&lt;b&gt; (of &lt;b&gt;, a)</td>" in exported
    assert "<td>a (of &lt;b&gt;, a)</td>" in exported_lake(lake, "cluster=a")


@pytest.mark.parametrize("query", ["", "gpus=4096&failures=20kh&over=failures&strategy=drop"])
def test_the_planner_is_that_of_its_page(tmp_path: Path, query: str) -> None:
    exported = exported_planner(query)
    assert_alone(exported)
    pairs = parse_qsl(query)
    assert bytes(curves_response(pairs).body).decode() in exported
    served = bytes(page_response(pairs).body).decode()
    clock = re.compile(r"<time.*?</time>")
    answer = served[served.index('<div id="answer">') : served.index("</main>")]
    assert clock.sub("", answer) in clock.sub("", exported)
    for key, text in pairs:
        assert key == "over" or f"<td>{text}</td>" in unescape(exported)


def test_a_whole_address_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    address = "http://127.0.0.1:8470/plan?gpus=4096&cost=30s"
    assert main(["view", "--plan", "--export", str(file), "--query", address]) == 0
    assert "<td>4096</td>" in file.read_text() and "<td>30s</td>" in file.read_text()
