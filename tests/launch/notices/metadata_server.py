"""A metadata service on this machine that speaks the protocols of AWS, Google Cloud and Azure."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AWS = "/latest/meta-data/"
GCP = "/computeMetadata/v1/instance/"
AZURE = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


class MetadataServer(ThreadingHTTPServer):
    """Answers of the service by path; others are 404. `clock_s`: how far its clock is ahead."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.requests: list[str] = []
        self.on_request: Callable[[], object] = lambda: None
        self.status = 200
        self.clock_s = 0.0
        self.stands = threading.Event()  # set: requests get no answer until it is cleared
        self.ends = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def now(self) -> datetime:
        return datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=self.clock_s)

    def spot(self, within_s: float, action: str = "terminate") -> None:
        at = (self.now() + timedelta(seconds=within_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = json.dumps({"action": action, "time": at})
        self.answers[f"{AWS}spot/instance-action"] = text

    def rebalance(self) -> None:
        text = json.dumps({"noticeTime": self.now().strftime("%Y-%m-%dT%H:%M:%SZ")})
        self.answers[f"{AWS}events/recommendations/rebalance"] = text

    def google(self, preempted: str = "FALSE", maintenance: str = "NONE") -> None:
        self.answers[f"{GCP}preempted"] = preempted
        self.answers[f"{GCP}maintenance-event"] = maintenance

    def azure(self, *events: dict[str, Any]) -> None:
        self.answers[NAME] = "trainer_7"
        self.answers[AZURE] = json.dumps({"DocumentIncarnation": 1, "Events": list(events)})

    def azure_event(self, kind: str, within_s: float, *machines: str) -> dict[str, Any]:
        at = format_datetime(self.now() + timedelta(seconds=within_s), usegmt=True)
        return {
            "EventId": f"id-{kind}", "EventType": kind, "ResourceType": "VirtualMachine",
            "Resources": list(machines), "EventStatus": "Scheduled", "NotBefore": at,
            "Description": "Virtual machine is going to be deleted", "EventSource": "Platform",
            "DurationInSeconds": -1,
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    """The headers and tokens that each cloud asks for are asked for."""

    server: MetadataServer

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(self.server.now(), usegmt=True)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base
        self.server.requests.append(format % args)
        self.server.on_request()

    def do_PUT(self) -> None:
        life_s = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token" or not life_s.isdecimal():
            self._answer(400, "")
            return
        token = secrets.token_urlsafe(40)
        self.server.tokens.add(token)
        self._answer(200, token)

    def do_GET(self) -> None:
        if self.server.stands.is_set():
            self.server.ends.wait(60)
        if self.server.status != 200:
            self._answer(self.server.status, "")
        elif self.path.startswith(AWS) and (
            self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens
        ):
            self._answer(401, "")
        elif self.path.startswith(GCP) and self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403, "")
        elif self.path.startswith("/metadata/") and self.headers.get("Metadata") != "true":
            self._answer(400, "")
        elif self.path in self.server.answers:
            self._answer(200, self.server.answers[self.path])
        else:
            self._answer(404, "")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def metadata_server() -> Iterator[MetadataServer]:
    """Serve until the end."""
    server = MetadataServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.ends.set()
        server.shutdown()
        thread.join(10)
        server.server_close()
