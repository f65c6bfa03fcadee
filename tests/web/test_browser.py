"""The page in a real browser: figures, colours, widths, and a run that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.telemetry.synthetic_run import SyntheticRun
from tests.web.conftest import opened, serving

from outlast.cli.main import main

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not shutil.which("chromium"), reason="there is no Chromium on this machine"),
]

WAIT_MS = 60_000  # for a report on a busy machine


def test_a_live_page_follows_a_kill_and_the_end(browser: Browser, tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "gpt", world=4).start().steps(5)
    with serving(run.run_dir) as link:
        page = opened(browser, link)
        expect(page.locator("#answer-training")).to_contain_text("step 5")
        run.killed(2).steps(3)
        expect(page.locator("#answer-broken")).to_contain_text("1 incident", timeout=30_000)
        page.locator("#incident-1 summary").click()
        run.steps(4)
        expect(page.locator("#answer-training")).to_contain_text("step 12", timeout=30_000)
        expect(page.locator("#incident-1")).to_have_attribute("open", "")
        run.end().close()
        expect(page.locator("#live")).to_contain_text("ended", timeout=30_000)


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light"), (3840, "dark")])
def test_the_exported_page(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    run = SyntheticRun(tmp_path / "gpt", world=4).start().steps(5).killed(2).steps(5)
    run.end().close()
    path = tmp_path / "page.html"
    assert main(["view", str(run.run_dir), "--export", str(path)]) == 0
    page = opened(browser, path.as_uri(), width, scheme)
    for key in ("training", "speed", "broken", "safety", "finish"):
        expect(page.locator(f"#answer-{key} b")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lane = page.locator("path.lane.step").first
    assert lane.evaluate("path => getComputedStyle(path).fill") != "rgb(0, 0, 0)"
    page.locator("svg a").first.click()
    expect(page.locator("#incident-1")).to_have_attribute("open", "")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_two_runs_of_an_index(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    SyntheticRun(tmp_path / "first", world=4).start().steps(9).killed(2).steps(5).end().close()
    run = SyntheticRun(tmp_path / "second", world=2).start().steps(30)
    with serving(tmp_path) as link:
        page = opened(browser, link, width, scheme)
        page.get_by_label("compare first").check()
        page.get_by_label("compare second").check()
        page.get_by_role("button").click()
        expect(page.get_by_text("step 14")).to_be_visible()
        expect(page.get_by_text("step 30")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        lines = page.locator("#curves ~ figure polyline").all()
        colours = {line.evaluate("it => getComputedStyle(it).stroke") for line in lines}
        assert len(lines) == 4 and len(colours) == 2 and "none" not in colours
        run.steps(4).end().close()
        expect(page.get_by_text("step 34")).to_be_visible(timeout=WAIT_MS)
        expect(page.locator("#live")).to_contain_text("both have ended", timeout=WAIT_MS)


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
def test_the_planner_follows_its_sliders(
    browser: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    run = SyntheticRun(tmp_path / "gpt", world=2).start().steps(2)
    with serving(run.run_dir) as link:
        page = opened(browser, f"{link}plan?cost=30s", width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        before = page.locator("#answer-goodput b").inner_text()
        expect(page.locator("#curves polygon.band.outlast")).to_have_count(1, timeout=WAIT_MS)
        slider = page.get_by_label("GPUs, slider")
        slider.press("End")
        expect(page.locator("#answer-goodput b")).not_to_have_text(before)
        largest = page.get_by_label("GPUs", exact=True).input_value()
        assert int(largest) > 1_000_000 and f"gpus={largest}" in page.url
        assert "cost=30s" in page.url and "outlast plan compare" in page.content()
        answered = page.locator("#answer").inner_text()
        page.reload()
        expect(page.locator("#answer")).to_have_text(answered, use_inner_text=True)
        page.get_by_label("Work", exact=True).fill("forever")
        expect(page.get_by_role("alert")).to_contain_text("work forever")


@pytest.mark.parametrize(
    ("width", "scheme"), [pytest.param(360, "dark", marks=pytest.mark.extended), (1280, "light")]
)
def test_the_controls_of_a_lake(browser: Browser, tmp_path: Path, width: int, scheme: str) -> None:
    logs, lake = tmp_path / "logs", tmp_path / "lake"
    assert main(["fleet", "synth", str(logs), "--days=4", "--nodes=48", "--seed=4"]) == 0
    paths = [str(logs / name) for name in ("sacct.txt", "health.jsonl", "nodes.csv")]
    assert main(["fleet", "ingest", str(lake), *paths]) == 0
    with serving(lake) as link:
        page = opened(browser, link, width, scheme)
        expect(page.locator("#answer-lemons b")).to_be_visible(timeout=WAIT_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_label("Rates of jobs above, GPUs").fill("16")
        page.get_by_label("Until").fill("2024-06-03")
        page.get_by_label("Until").blur()
        expect(page.locator("#answer-r_f")).to_contain_text(
            "of jobs above 16 GPUs", timeout=WAIT_MS
        )
        expect(page.locator("#report")).to_contain_text("--above-gpus=16", timeout=WAIT_MS)
        assert "until=2024-06-03" in page.url and "above-gpus=16" in page.url
        shown = page.locator("#report").inner_text()
        page.reload()
        expect(page.locator("#report")).to_have_text(shown, use_inner_text=True, timeout=WAIT_MS)
        page.locator("#lemons a").first.click()
        expect(page.locator("#answer-evidence b")).to_be_visible(timeout=WAIT_MS)
        assert "above-gpus=16" in page.url
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.go_back()
        page.get_by_text("plan with the rates of this lake").click()
        expect(page.locator("#answer-goodput b")).to_be_visible(timeout=WAIT_MS)
        page.goto(f"{link}?above-gpus=16")
        page.get_by_label("Partition").select_option("learn")
        expect(page.locator("#report")).to_contain_text(
            "only jobs of partition learn", timeout=WAIT_MS
        )
        page.get_by_role("textbox", name="Node").fill("nobody")
        page.get_by_role("button", name="Show node").click()
        expect(page.get_by_role("alert")).to_contain_text("names node nobody", timeout=WAIT_MS)


def test_a_lake_without_a_script(browser: Browser, tmp_path: Path) -> None:
    logs, lake = tmp_path / "logs", tmp_path / "lake"
    assert main(["fleet", "synth", str(logs), "--days=4", "--nodes=48", "--seed=4"]) == 0
    assert main(["fleet", "ingest", str(lake), str(logs / "sacct.txt")]) == 0
    with serving(lake) as link:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto(link)
        page.get_by_label("Rates of jobs above, GPUs").fill("16")
        page.get_by_role("button", name="Compute").click()
        assert "above-gpus=16" in page.url
        expect(page.locator("#answer-r_f")).to_contain_text(
            "of jobs above 16 GPUs", timeout=WAIT_MS
        )


def view_of(page: Page) -> list[float]:
    text = page.locator("#timeline .shapes").get_attribute("viewBox")
    return [float(number) for number in (text or "").split()]


@pytest.mark.parametrize("is_served", [False, True])
def test_the_axis_of_time_is_zoomed(browser: Browser, tmp_path: Path, *, is_served: bool) -> None:
    run = SyntheticRun(tmp_path / "gpt", world=4).start().steps(40).killed(2).steps(200)
    run.end().close()
    path = tmp_path / "page.html"
    assert main(["view", str(run.run_dir), "--export", str(path)]) == 0
    with serving(run.run_dir) as link:
        page = opened(browser, link if is_served else path.as_uri())
        whole = view_of(page)
        page.get_by_role("button", name="zoom in").click()
        page.keyboard.press("+")
        expect(page.locator("#shown")).to_contain_text(" to ")
        assert "#t=" in page.url
        if is_served:  # the figures of the window alone, in finer columns
            expect(page.locator("#timeline .figure")).not_to_have_attribute("data-from", "0.000000")
            assert view_of(page) == pytest.approx(whole)
        else:
            assert view_of(page)[2] == pytest.approx(250)
        address = page.url
        page.reload()
        expect(page.locator("#shown")).to_contain_text(" to ")
        assert page.url == address
        page.get_by_role("button", name="later").focus()
        page.keyboard.press("ArrowRight")
        assert page.url != address
        if not is_served:  # a figure that stays: drag it
            box = page.locator("#timeline .figure").bounding_box()
            assert box
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
            before = page.url
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 30, steps=3)
            page.mouse.up()
            assert page.url != before and "#t=" in page.url
            page.get_by_role("button", name="later").focus()
        page.keyboard.press("0")
        expect(page.locator("#shown")).to_have_text("")
        assert "t=" not in page.url
        page.locator("svg a").first.click()
        page.get_by_role("button", name="zoom in").click()
        assert "incident-1" in page.url and "t=" in page.url


def test_the_planner_without_a_script(browser: Browser, tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "gpt", world=2).start().steps(2)
    with serving(run.run_dir) as link:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto(f"{link}plan")
        expect(page.locator("input[type=range]").first).to_be_hidden()
        page.get_by_label("GPUs", exact=True).fill("4096")
        page.get_by_role("button").click()
        assert "gpus=4096" in page.url
        expect(page.locator("#answer-goodput b")).to_be_visible()
