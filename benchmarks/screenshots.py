"""Screenshots of pages for the documentation: two runs and the planner, light and dark, at three
widths. They need Chromium, and are written into docs/images."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import view_runs
from playwright.sync_api import Browser, sync_playwright
from view import serving

from outlast import events

LARGEST_BYTES = 150_000  # more is exit code 1
AGE_NS = 1_080_000_000_000  # of the first event
SETTLES_MS = 4_000
PICTURES = (  # name, address, width, height, scheme
    ("run-light", "runs/gpt", 1280, 1000, "light"),
    ("run-dark", "runs/gpt", 1280, 1000, "dark"),
    ("run-narrow", "runs/gpt", 390, 1000, "light"),
    ("run-16384-ranks", "runs/large", 1920, 1000, "dark"),
    ("planner-light", "plan?gpus=16384&cost=30s", 1120, 800, "light"),
)


def write_runs(folder: Path) -> None:
    """Write a run that goes on, and one of 16,384 ranks."""
    view_runs.T0_NS = time.time_ns() - AGE_NS
    run = view_runs.write_long_run(folder / "gpt", 160_000)
    run.say(
        events.LoopBegun(
            t_ns=run.t_ns, worker="w1-0", seat=0, until=40_000, epochs=None, length=None
        )
    )
    run.close()
    view_runs.write_large_run(folder / "large", 16_384)


def take(browser: Browser, link: str, into: Path) -> None:
    """Write all pictures."""
    for name, address, width, height, scheme in PICTURES:
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
        )
        page.goto(f"{link}{address}")
        page.wait_for_timeout(SETTLES_MS)  # what comes behind the first screen
        path = into / f"{name}.png"
        page.screenshot(path=path)
        print(path, path.stat().st_size)
        page.close()


def main() -> int:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        write_runs(Path(name))
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        with serving(Path(name)) as (link, _):
            take(browser, link, given.into)
        browser.close()
    return int(any(path.stat().st_size > LARGEST_BYTES for path in given.into.glob("*.png")))


if __name__ == "__main__":
    sys.exit(main())
