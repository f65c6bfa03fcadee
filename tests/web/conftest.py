"""A served page, as a user starts it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright


@contextmanager
def serving(path: Path | str, *flags: str) -> Iterator[str]:
    """Yield the link that `outlast view` prints; the server ends with the block, by Ctrl-C."""
    words = [sys.executable, "-m", "outlast", "view", str(path), "--port=0", *flags]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as it:
        try:
            assert it.stdout is not None
            text = ""
            while not (found := re.search(r"http://\S+", text)):
                line = it.stdout.readline()
                assert line, text
                text += line
            yield found[0]
        finally:
            it.send_signal(signal.SIGINT)
            rest, _ = it.communicate(timeout=30)
        assert it.returncode in (0, 130) and "Traceback" not in rest, rest


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def opened(browser: Browser, link: str, width: int = 1280, scheme: str = "light") -> Page:
    """Open a page that must not complain."""
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(link)
    assert complaints == []
    return page
