"""The server of pages: what it serves, to whom, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from email.message import Message
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from tests.telemetry.synthetic_run import SyntheticRun
from tests.web.conftest import serving

pytestmark = pytest.mark.process


class Answered(NamedTuple):
    """A whole response."""

    status: int
    headers: Message
    body: bytes


@contextmanager
def requested(link: str, path: str = "", **headers: str) -> Iterator[HTTPResponse]:
    """Yield the response to a request, for its body to be read."""
    parts = urlsplit(link)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
        connection.request("GET", path or f"{parts.path}?{parts.query}", headers=headers)
        with connection.getresponse() as response:
            yield response


def get(link: str, path: str = "", **headers: str) -> Answered:
    """Request a page, whole."""
    with requested(link, path, **headers) as response:
        return Answered(response.status, response.headers, response.read())


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    """A run that has not ended."""
    return SyntheticRun(tmp_path / "gpt", world=2).start().steps(5)


def test_a_run_is_served_and_followed_to_its_end(run: SyntheticRun) -> None:
    logs = run.run_dir / "logs"
    (logs / "0" / "w1-0").mkdir(parents=True)
    (logs / "0" / "w1-0" / "stderr.log").write_bytes(b"\xff</pre><script>x</script>\n" * 9000)
    (logs / "1" / "w1-1").mkdir(parents=True)
    (logs / "1" / "w1-1" / "stderr.log").symlink_to("/etc/passwd")
    with serving(run.run_dir) as link:
        page = get(link)
        assert page.status == 200 and b"step 5" in page.body
        assert "default-src 'none'" in page.headers["content-security-policy"]
        with requested(link, "/runs/gpt/stream") as stream:
            assert len(json.loads(message(stream))["parts"]) == 8
            run.killed(1).steps(3)
            while "1 incident" not in message(stream):
                pass
            run.end().close()
            while "ended" not in message(stream):
                pass
        window = json.loads(get(link, "/runs/gpt/window?from=0.2&to=1e9").body)
        assert window.keys() == {"timeline", "curves"} and 'data-from="0.2' in window["timeline"]
        for query, status in (("from=5&to=1", 503), ("from=nan&to=1", 400), ("from=1", 400)):
            assert get(link, f"/runs/gpt/window?{query}").status == status
        log = get(link, "/runs/gpt/logs/0")
        assert log.headers["content-type"].startswith("text/plain")
        assert len(log.body) < 200_000
        assert get(link, "/runs/gpt/logs/0/other").status == 404
        followed = get(link, "/runs/gpt/logs/5/follow")  # the run has ended, and so does it
        assert followed.body == b"rank 5 has written nothing\n"
        secret = get(link, "/runs/gpt/logs/1")
        assert secret.status == 404 and b"root:" not in secret.body
        for path in ("/runs/other", "/runs/..%2f..%2fetc", "/runs/gpt/logs/..%2f0", "/etc/passwd"):
            assert get(link, path).status == 404, path
        refused = get(link, "/", Host="evil.example")
        assert refused.status == 400 and refused.headers["x-content-type-options"] == "nosniff"


def message(stream: HTTPResponse) -> str:
    """Return the data of the next message of a stream."""
    while line := stream.readline():
        if line.startswith(b"data: "):
            return line[6:].decode()
    raise AssertionError("the stream has ended")


def test_another_address_needs_the_token(run: SyntheticRun) -> None:
    with serving(run.run_dir, "--host=0.0.0.0") as link:
        bare = link.partition("?")[0]
        assert get(bare, "/").status == 403
        assert get(bare, "/?token=wrong").status == 403
        opened = get(link)
        cookie = opened.headers["set-cookie"].partition(";")[0]
        assert opened.status == 303 and "HttpOnly" in opened.headers["set-cookie"]
        assert get(bare, "/", Cookie=cookie).status == 200
        assert get(bare, "/runs/gpt/stream").status == 403


def test_an_index_of_runs(run: SyntheticRun, tmp_path: Path) -> None:
    SyntheticRun(tmp_path / "a b&#%c", world=2).start().steps(7).killed(1).steps(2).end().close()
    (tmp_path / "damaged" / "events").mkdir(parents=True)
    with serving(tmp_path) as link:
        text = get(link).body.decode()
        assert "a b&amp;#%c" in text and "step 9" in text and "damaged" in text
        assert get(link, "/runs/a%20b%26%23%25c").status == 200
        assert get(link, "/runs/damaged").status == 503
        for name, status in (("damaged", 503), ("other", 404), ("a%20b%26%23%25c", 303)):
            measured = get(link, f"/runs/{name}/plan")
            assert measured.status == status, measured.body
        assert get(link, measured.headers["location"]).status == 200
        refused = get(link, "/plan?gpus=" + "9" * 10_000)
        assert refused.status == 400 and b"10,000 characters" in refused.body


def test_the_planner_alone() -> None:
    with serving("--plan") as link:
        first = get(link)
        assert first.status == 303 and first.headers["location"] == "/plan"
        assert b'id="answer-goodput"' in get(link, "/plan?gpus=4096").body
        assert get(link, "/runs/gpt").status == 404


def test_the_server_ends_beside_an_open_stream(run: SyntheticRun) -> None:
    with ExitStack() as opened, serving(run.run_dir) as link:
        message(opened.enter_context(requested(link, "/runs/gpt/stream")))


def test_a_port_in_use_is_refused(run: SyntheticRun) -> None:
    from outlast.cli.main import main

    with serving(run.run_dir) as link:
        assert main(["view", str(run.run_dir), f"--port={urlsplit(link).port}"]) == 2
