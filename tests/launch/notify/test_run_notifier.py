"""Messages of whole runs: which are sent, and what they hold."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launch.notify.webhook_server import serving
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import Fault
from outlast.launch.notify.run_notifier import notifying
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.live_view import LineDisplay

Story = Callable[[SyntheticRun], object]


def played(folder: Path, story: Story, target: str = "", **variables: str) -> list[Any]:
    """Return the bodies that a server got of a run whose events a display has shown."""
    run = SyntheticRun(folder / "run", world=4, spares=1)
    told: list[str] = []
    with serving() as server:
        text = target.replace("SERVER", server.url) or server.url
        variables["HOOK"] = f"{server.url}/hook"
        reader = EventReader(folder / "run")
        with notifying([text], variables, told.append) as wrap:
            view = LineDisplay(None, lines=io.StringIO(), stream=io.StringIO())
            shown = wrap(view, view.feed, folder / "run")
            story(run)
            run.close()
            for event in reader.poll():
                shown.event(event)
            shown.beats(dict.fromkeys(run.seats, (10, 10, "running", 2.5)))
            shown.close()
        assert told == []
        return server.bodies


def killed_twice(run: SyntheticRun) -> None:
    run.start().steps(5).killed(2).steps(5).killed(1).steps(2).end()


def failed(run: SyntheticRun) -> None:
    run.start().steps(3)
    fault = run.fault("raised", 1, detail="bad password=hunter22", traceback="E: password=hunter22")
    run.broken(1, fault, how="report")
    run.give_up((1,))
    run.end("user_error", 1, fault)


def test_a_webhook_gets_each_message_once(tmp_path: Path) -> None:
    bodies = played(tmp_path, killed_twice)
    kinds = [body["message"] for body in bodies]
    assert sorted(kinds) == sorted(["start", *["incident", "recovery"] * 2, "done"])
    by_kind = {body["message"]: body for body in bodies}
    assert by_kind["start"]["text"].startswith("train.py: 4 ranks and 1 spare")
    incident = by_kind["recovery"]["incident"]
    assert (incident["number"], incident["cause"], incident["rank"]) == (2, "killed", 1)
    assert incident["rung"] == "replace" and incident["seconds"] > 0
    assert "recovered in" in by_kind["recovery"]["text"]
    done = by_kind["done"]
    assert (done["outcome"], done["exit_code"], done["step"]) == ("done", 0, 12)
    assert done["incident"] is None and done["run_dir"] == str(tmp_path / "run")
    assert all(body["version"] == 1 and body["run"] == "story" for body in bodies)
    assert "--steps" not in json.dumps(bodies)  # arguments of the script


def test_a_failure_has_its_cause_without_secrets(tmp_path: Path) -> None:
    bodies = played(tmp_path, failed, "SERVER on=failure")
    assert [body["message"] for body in bodies] == ["failure"]
    assert "bad password=" in bodies[0]["text"] and bodies[0]["exit_code"] == 1
    assert bodies[0]["incident"]["number"] == 1
    assert "hunter22" not in json.dumps(bodies)


def test_requests_are_no_incidents(tmp_path: Path) -> None:
    bodies = played(tmp_path, lambda run: run.start().steps(3).drained())
    assert sorted(body["message"] for body in bodies) == ["interrupted", "start"]


def test_incidents_of_earlier_launchers_are_not_repeated(tmp_path: Path) -> None:
    def resumed(run: SyntheticRun) -> None:
        run.start().steps(3).killed(1).steps(1).end("interrupted", 4)
        run.start(resumed_n=4, resumed_step=4).steps(2).killed(0).steps(1).end()

    bodies = played(tmp_path, resumed)
    numbers = [body["incident"]["number"] for body in bodies if body["incident"]]
    assert sorted(numbers) == [1, 1, 2, 2]
    assert sum(body["message"] == "start" for body in bodies) == 2


def test_slack_gets_escaped_text(tmp_path: Path) -> None:
    def mentions(run: SyntheticRun) -> None:
        run.start().steps(1)
        fault = Fault(kind="internal", detail="<!channel> a & b", t_ns=run.t_ns)
        run.end("gave_up", 3, fault)

    start, failure = sorted(
        (body["text"] for body in played(tmp_path, mentions, "slack+env:HOOK")), key=len
    )
    assert start.startswith("*train.py: started*")
    assert "&lt;!channel&gt; a &amp; b" in failure and "<" not in failure
    assert f"`outlast explain {tmp_path / 'run'}`" in failure


def test_pagerduty_is_paged_for_failures_alone(tmp_path: Path) -> None:
    address = "pagerduty+SERVER/v2/enqueue?routing_key=env:KEY"
    (page,) = played(tmp_path / "a", failed, address, KEY="k3y")
    assert (page["event_action"], page["dedup_key"]) == ("trigger", "outlast/story")
    assert page["routing_key"] == "k3y" and page["payload"]["severity"] == "critical"
    assert page["payload"]["custom_details"]["exit_code"] == 1
    (page,) = played(tmp_path / "b", killed_twice, address, KEY="k3y")
    assert page == {"routing_key": "k3y", "event_action": "resolve", "dedup_key": "outlast/story"}


def test_pagerduty_resolves_alerts_of_incidents(tmp_path: Path) -> None:
    address = "pagerduty+SERVER?routing_key=env:KEY on=incident,failure"
    pages = played(tmp_path / "a", killed_twice, address, KEY="k3y")
    actions = [(page["dedup_key"], page["event_action"]) for page in pages]
    for number in (1, 2):
        key = f"outlast/story/incident-{number}"
        assert [action for name, action in actions if name == key] == ["trigger", "resolve"]
    pages = played(tmp_path / "b", failed, address, KEY="k3y")
    assert sorted(page["event_action"] for page in pages) == ["resolve", "trigger", "trigger"]
