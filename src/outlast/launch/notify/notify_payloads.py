"""Bodies of notifications: a webhook's JSON, and the formats of Slack and PagerDuty."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from outlast.launch.notify.notify_targets import Message, NotifyTarget
from outlast.telemetry.history.incident_course import Incident

VERSION = 1
_SUMMARY_MAX = 1024  # characters, of PagerDuty
_TITLES: dict[Message, str] = {
    "start": "started",
    "incident": "incident",
    "recovery": "recovered",
    "interrupted": "interrupted",
    "failure": "failed",
    "done": "done",
}


class NotifiedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """Incident of a message. `seconds`: from the fault to the recovery, or so far."""

    number: int
    cause: str
    rank: int | None
    host: str
    step: int | None
    rung: str
    reason: str
    seconds: float
    committed_steps_lost: int


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a run, as a webhook gets it."""

    version: int = VERSION
    message: Message
    text: str
    run: str
    run_dir: str
    script: str
    host: str
    time: str
    step: int
    world: int
    outcome: str | None = None
    exit_code: int | None = None
    incident: NotifiedIncident | None = None


def notified(incident: Incident, reason: str) -> NotifiedIncident:
    """Return an incident for a message; `reason`: without secrets."""
    cause = incident.cause
    return NotifiedIncident(
        number=incident.number,
        cause=cause.kind,
        rank=cause.seat if cause.seat >= 0 else None,
        host=cause.host,
        step=incident.step if incident.step >= 0 else None,
        rung=incident.rung,
        reason=reason,
        seconds=round(incident.total_ms / 1e3, 3),
        committed_steps_lost=incident.committed_steps_lost,
    )


def time_text(t_ns: int) -> str:
    """Format a time as RFC 3339, in UTC with milliseconds."""
    return datetime.fromtimestamp(t_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")


def bodies(notification: Notification, target: NotifyTarget) -> list[bytes]:
    """Return the bodies that a target gets for a message, in order; none where it is not wanted."""
    if target.template == "pagerduty":
        found: list[Any] = _pagerduty(notification, target)
    elif notification.message not in target.messages:
        found = []
    else:
        found = [_slack(notification) if target.template == "slack" else notification]
    return [msgspec.json.encode(body) for body in found]


def _title(notification: Notification) -> str:
    return f"{notification.script}: {_TITLES[notification.message]}"


def _slack(notification: Notification) -> dict[str, str]:
    lines = [f"*{_plain(_title(notification))}*", _plain(notification.text)]
    lines.append(f"run {_plain(notification.run)} on {_plain(notification.host)}")
    if notification.message in ("incident", "recovery", "failure", "interrupted"):
        lines.append(f"`outlast explain {_plain(notification.run_dir)}`")
    return {"text": "\n".join(lines)}


def _plain(text: str) -> str:
    """Escape a text, so that it neither formats nor mentions anybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _pagerduty(notification: Notification, target: NotifyTarget) -> list[dict[str, Any]]:
    """Return events: each incident has an alert of its own, which its recovery or the run's end
    resolves, and the run's failure another one."""
    of_run = f"outlast/{notification.run}"
    incident, message = notification.incident, notification.message
    found = []
    if message == "failure" and message in target.messages:
        found.append(_page(notification, target.routing_key, of_run, "critical"))
    elif message == "done" and message in target.messages:
        found.append(_page(notification, target.routing_key, of_run))
    if incident and "incident" in target.messages:
        severity = "warning" if message == "incident" else ""
        of_incident = f"{of_run}/incident-{incident.number}"
        found.append(_page(notification, target.routing_key, of_incident, severity))
    return found


def _page(
    notification: Notification, routing_key: str, dedup_key: str, severity: str = ""
) -> dict[str, Any]:
    """Return an event that opens an alert of a severity, or resolves it without one."""
    action = "trigger" if severity else "resolve"
    body = {"routing_key": routing_key, "event_action": action, "dedup_key": dedup_key}
    if not severity:
        return body
    incident = notification.incident
    payload = {
        "summary": f"{_title(notification)}: {notification.text}"[:_SUMMARY_MAX],
        "source": notification.host,
        "severity": severity,
        "timestamp": notification.time,
        "component": notification.script,
        "group": notification.run,
        "class": incident.cause if incident else notification.message,
        "custom_details": notification,
    }
    return {**body, "payload": payload}
