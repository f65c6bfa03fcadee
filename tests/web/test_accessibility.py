"""Accessibility of the pages: axe-core, keyboard, and the first screen without a script."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from tests.telemetry.synthetic_run import SyntheticRun
from tests.web.conftest import opened, serving
from tests.web.test_lake_page import ingested

from outlast.cli.main import main
from outlast.events import LoopBegun, Note

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not shutil.which("chromium"), reason="there is no Chromium on this machine"),
]
GRAVE = ("serious", "critical")
PAGES = (
    "",
    "runs/gpt",
    "plan?gpus=4096",
    "plan?gpus=luck",
    "compare?run=gpt&run=other",
    "compare?run=gpt&run=luck",
    "export",
    "export --plan",
    "lake/",
    "lake/?partition=learn&above-gpus=8",
    "lake/?partition=luck",
    "lake/node?node=rsc1-0001",
    "lake/node?node=luck",
    "lake/export",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a live run that has everything, and one that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    run = SyntheticRun(folder / "gpt", world=4).start().steps(40).killed(2).steps(40)
    run.say(LoopBegun(t_ns=run.t_ns, worker="w1-0", seat=0, until=900, epochs=None, length=None))
    run.say(Note(t_ns=run.t_ns, worker="w1-0", seat=0, text="a note", level="warning"))
    SyntheticRun(folder / "other", world=2).start().steps(5).end().close()
    return folder


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ingested(tmp_path_factory.mktemp("fleet"), "--shape=rsc1", "--seed=4")


@contextmanager
def page_of(browser: Browser, shown: Path, name: str, width: int, scheme: str) -> Iterator[Page]:
    if name.startswith("export"):
        path = shown.parent / f"{name}-{width}-{scheme}.html"
        words = ["--plan"] if "--plan" in name else [str(shown)]
        assert main(["view", *words, "--export", str(path)]) == 0
        yield opened(browser, path.as_uri(), width, scheme)
        return
    with serving(shown) as link:
        is_refusal = "luck" in name
        page = browser.new_page(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.goto(f"{link}{name}")
        assert page.get_by_role("alert").count() == is_refusal
        yield page


def _views() -> Iterator[object]:
    """Each page, narrow and dark or wide and light, in turn; the other one is an extended test."""
    for number, name in enumerate(PAGES):
        views = [(360, "dark"), (1280, "light")]
        yield (name, *views[number % 2])
        yield pytest.param(name, *views[1 - number % 2], marks=pytest.mark.extended)


@pytest.mark.parametrize(("name", "width", "scheme"), [*_views()])
def test_axe_finds_nothing_grave(
    browser: Browser, runs: Path, lake: Path, name: str, width: int, scheme: str
) -> None:
    shown = lake if name.startswith("lake/") else runs / "gpt" if name == "export" else runs
    with page_of(browser, shown, name.removeprefix("lake/"), width, scheme) as page:
        page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
        found = Axe().run(page).response["violations"]
        grave = [
            (one["id"], one["help"], [node["html"][:200] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in GRAVE
        ]
        assert grave == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_all_controls_are_reached_by_keys(browser: Browser, runs: Path) -> None:
    with page_of(browser, runs, "runs/gpt", 1280, "light") as page:
        names: list[str] = []
        for _ in range(40):
            page.keyboard.press("Tab")
            names.append(
                page.evaluate(
                    "(document.activeElement.getAttribute('aria-label')"
                    " ?? document.activeElement.textContent).trim()"
                )
            )
        for name in ("all runs", "zoom in", "whole run", "incident 1", "last lines of rank 0"):
            assert name in names, names


def test_the_first_screen_without_a_script(browser: Browser, runs: Path) -> None:
    with serving(runs) as link:
        page = browser.new_context(java_script_enabled=False).new_page()
        page.goto(f"{link}runs/gpt")
        for key in ("training", "speed", "broken", "safety", "finish"):
            expect(page.locator(f"#answer-{key} b")).to_be_visible()
        expect(page.locator("#zoom")).to_be_hidden()
        assert page.locator("#timeline path.lane").count()
