"""Notifications of real runs: one that loses a rank, and one that fails beside a dead server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.end_to_end.conftest import Runner
from tests.launch.notify.webhook_server import serving

from outlast.launch.notify.run_notifier import CLOSE_S

pytestmark = pytest.mark.process


def test_a_run_that_loses_a_rank(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("HOOK", f"{server.url}/services/s3cret")
        flags = ("--notify=slack+env:HOOK", f"--notify={server.url}/hook", "--spares=1")
        outcome = runner.run(*flags, "--fault=kill:rank=1,step=5,phase=backward")
        assert outcome.code == 0
        bodies = [body for body in server.bodies if "message" in body]
        assert len(server.bodies) == 2 * len(bodies)  # Slack's
    assert [body["message"] for body in bodies] == ["start", "incident", "recovery", "done"]
    assert bodies[2]["incident"]["rung"] == "replace" and bodies[2]["incident"]["rank"] == 1
    assert set(server.paths) == {"/services/s3cret", "/hook"}
    files = [path for path in Path(outcome.run_dir).rglob("*") if path.is_file()]
    assert len(files) > 5 and not any(b"s3cret" in path.read_bytes() for path in files)
    assert "s3cret" not in outcome.output


def test_a_failure_beside_a_server_that_hangs(runner: Runner) -> None:
    with serving() as server:
        server.answers = ["hang"] * 100
        job = runner.start(f"--notify={server.url}", "--fault=raise:rank=1,step=5,times=9")
        server.wait(1)
        outcome = runner.end(job)
        ended_s = time.time()
    assert outcome.code == 1 and "messages" in outcome.output and "not sent" in outcome.output
    newest_s = max(path.stat().st_mtime for path in (outcome.run_dir / "events").iterdir())
    assert ended_s - newest_s < CLOSE_S + 15
