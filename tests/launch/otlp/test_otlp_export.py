"""What a receiver of OTLP gets of whole runs, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.conftest import Runner
from tests.launch.notify.webhook_server import WebhookServer, serving
from tests.telemetry.synthetic_run import SyntheticRun

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from outlast.launch.otlp import otlp_exporter
from outlast.launch.otlp.otlp_exporter import OtlpExporter, exporting
from outlast.launch.otlp.otlp_target import read_otlp_target
from outlast.telemetry.event_store import EventReader
from outlast.telemetry.live_view import LineDisplay
from outlast.telemetry.metrics.run_metrics import RunMetrics


class OtlpServer(WebhookServer):
    """A receiver of OTLP over HTTP."""

    def decode(self, path: str, body: bytes) -> Message:
        kinds = {
            "/v1/metrics": ExportMetricsServiceRequest,
            "/v1/traces": ExportTraceServiceRequest,
        }
        return kinds[path].FromString(body)

    def points(self) -> dict[str, float]:
        """Return the newest metrics, with their labels."""
        newest = [body for body in self.bodies if isinstance(body, ExportMetricsServiceRequest)][-1]
        found = {}
        for metric in newest.resource_metrics[0].scope_metrics[0].metrics:
            for point in getattr(metric, metric.WhichOneof("data")).data_points:
                labels = ",".join(f"{one.key}={one.value.string_value}" for one in point.attributes)
                found[metric.name + (f"{{{labels}}}" if labels else "")] = point.as_double
        return found

    def spans(self) -> list[Any]:
        return [
            span
            for body in self.bodies
            if isinstance(body, ExportTraceServiceRequest)
            for span in body.resource_spans[0].scope_spans[0].spans
        ]


def metrics_of(folder: Path) -> tuple[SyntheticRun, RunMetrics]:
    run = SyntheticRun(folder / "run", world=4, spares=1).start().steps(5).killed(2).steps(5)
    return run, RunMetrics(LineDisplay(None, lines=io.StringIO(), stream=io.StringIO()))


def show(metrics: RunMetrics, reader: EventReader, run: SyntheticRun) -> None:
    for event in reader.poll():
        metrics.event(event)
    metrics.beats(dict.fromkeys(run.seats, (10, 10, "running", 2.5)))


def test_metrics_and_incidents_of_a_run(tmp_path: Path) -> None:
    told: list[str] = []
    with serving(OtlpServer) as server:
        run, metrics = metrics_of(tmp_path)
        text = f"{server.url} bearer=env:TOKEN"
        with exporting(text, {"TOKEN": "s3cret"}, told.append) as export:
            export(metrics)
            show(metrics, EventReader(tmp_path / "run"), run)
        points, (root, *phases) = server.points(), server.spans()
        resource = server.bodies[-1].resource_spans[0].resource
    assert told == [] and "Bearer s3cret" in server.headers.values()
    assert points["outlast_step"] == 10 and points["outlast_loss"] == 2.5
    assert points["outlast_incidents{cause=killed,rung=replace}"] == 1
    about = {one.key: one.value for one in root.attributes}
    assert root.name == "incident killed" and about["outlast.rank"].int_value == 2
    assert about["outlast.rung"].string_value == "replace"
    assert {phase.parent_span_id for phase in phases} == {root.span_id}
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert phases[-1].end_time_unix_nano == root.end_time_unix_nano
    named = {one.key: one.value.string_value for one in resource.attributes}
    assert named["service.name"] == "outlast" and named["service.instance.id"] == "story"


def test_identities_are_those_of_the_exemplars(tmp_path: Path) -> None:
    with serving(OtlpServer) as server:
        run, metrics = metrics_of(tmp_path)
        with exporting(server.url, {}, print) as export:
            export(metrics)
            show(metrics, EventReader(tmp_path / "run"), run)
        root = server.spans()[0]
    (family,) = [one for one in metrics.collect() if one.name == "outlast_incidents"]
    exemplar = family.samples[0].exemplar
    assert exemplar is not None and exemplar.labels["incident"] == "1"
    assert bytes.fromhex(exemplar.labels["trace_id"]) == root.trace_id
    assert bytes.fromhex(exemplar.labels["span_id"]) == root.span_id


def test_incidents_wait_for_a_receiver_and_are_sent_once(tmp_path: Path) -> None:
    with serving(OtlpServer) as server:
        run, metrics = metrics_of(tmp_path)
        show(metrics, EventReader(tmp_path / "run"), run)
        server.answers = [400, 400]  # metrics and spans
        exporter = OtlpExporter(read_otlp_target(server.url, {}), str, every_s=0.05)
        exporter.begin(metrics)
        server.wait(6)
        lost = exporter.close()
        names = [span.name for span in server.spans()]
    assert names.count("incident killed") == 2  # the refused one, and the one that was taken
    assert "export failed" in lost and "400" in lost and "2 exports" in lost
    assert "incident" not in lost.partition("not sent in all")[2]


@pytest.mark.parametrize("answer", ["hang", "drip", "close", 307, 404])
def test_what_is_not_sent_is_told_and_the_exit_waits_no_longer(
    tmp_path: Path, answer: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_exporter, "ATTEMPT_S", 0.3)
    told: list[str] = []
    with serving(OtlpServer) as server:
        server.answers = [answer] * 50
        run, metrics = metrics_of(tmp_path)
        with exporting(f"{server.url} header=x-key=env:KEY", {"KEY": "k3y"}, told.append) as export:
            export(metrics)
            show(metrics, EventReader(tmp_path / "run"), run)
            monkeypatch.setattr(OtlpExporter.close, "__defaults__", (1.0,))
        server.ends.set()
        assert set(server.paths) <= {"/v1/metrics", "/v1/traces"}  # no redirect is followed
    (text,) = told
    assert "the end of the run" in text and "1 incident" in text and "k3y" not in text


def test_nobody_listens(tmp_path: Path) -> None:
    told: list[str] = []
    run, metrics = metrics_of(tmp_path)
    with exporting("http://127.0.0.1:9", {}, told.append) as export:
        export(metrics)
        show(metrics, EventReader(tmp_path / "run"), run)
    assert len(told) == 1 and "refused" in told[0]


def test_no_thread_stays(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serving(OtlpServer) as server, exporting(server.url, {}, print) as export:
        export(metrics_of(tmp_path)[1])
    assert set(threading.enumerate()) <= before


@pytest.mark.process
def test_a_killed_rank_of_a_real_run(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    with serving(OtlpServer) as server:
        outcome = runner.run("--fault=kill:rank=1,step=3", f"--otlp={server.url}")
        assert outcome.code == 0, outcome.output
        points, spans = server.points(), server.spans()
    assert points["outlast_run_outcome{outcome=done}"] == 1
    assert [span.name for span in spans if not span.parent_span_id] == ["incident killed"]
    assert spans[0].end_time_unix_nano > spans[0].start_time_unix_nano
