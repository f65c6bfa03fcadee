"""Metrics and incidents in OpenTelemetry's terms. Needs the extra `otlp`.

A metric keeps its name for Prometheus; a counter is without `_total`, which Prometheus adds. An
incident is a trace: a span from the fault to the recovery, with a child for each phase.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from prometheus_client import Metric as Family

from outlast import __version__
from outlast.telemetry.history.incident_course import PHASES, Incident
from outlast.telemetry.metrics.incident_identity import span_id, trace_id

_SCOPE = InstrumentationScope("outlast", __version__)
_UNITS = {"seconds": "s", "ratio": "1"}
_MS = 1_000_000


def run_resource(run: str) -> Resource:
    """Return the resource of a run; the environment's OTEL_RESOURCE_ATTRIBUTES and
    OTEL_SERVICE_NAME take precedence."""
    own = {"service.name": "outlast", "service.instance.id": run, "host.name": socket.gethostname()}
    return Resource(own).merge(OTELResourceDetector().detect())


def metrics_data(families: Iterable[Family], resource: Resource, now_ns: int) -> MetricsData:
    """Return the metrics of a run at a time."""
    metrics = [_metric(family, now_ns) for family in families if family.samples]
    scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(family: Family, now_ns: int) -> Metric:
    points = [
        NumberDataPoint(
            attributes=dict(sample.labels),
            start_time_unix_nano=0,  # unknown: counters go on over all launchers of the run
            time_unix_nano=now_ns,
            value=float(sample.value),
        )
        for sample in family.samples
    ]
    data = (
        Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        if family.type == "counter"
        else Gauge(points)
    )
    unit = _UNITS.get(family.name.rpartition("_")[2], "")
    return Metric(name=family.name, description=family.documentation, unit=unit, data=data)


def incident_spans(
    run: str, one: Incident, resource: Resource, clean: Callable[[str], str]
) -> Iterator[ReadableSpan]:
    """Yield the spans of an incident that is over, always with the same identities. `clean`
    redacts its texts."""
    end_ns = one.t_ns + round(one.total_ms * _MS)
    good = one.state == "recovered"
    about: dict[str, str | int] = {
        "outlast.run": run,
        "outlast.incident": one.number,
        "outlast.cause": one.cause.kind,
        "outlast.detail": clean(one.cause.detail),
        "outlast.rung": one.rung,
        "outlast.reason": clean(one.reason),
        "outlast.state": one.state,
        "outlast.step": one.step,
        "outlast.committed_steps_lost": one.committed_steps_lost,
        "outlast.generation_from": one.generation_from,
        "outlast.generation_to": one.generation_to,
    }
    if one.cause.seat >= 0:
        about |= {"outlast.rank": one.cause.seat, "outlast.host": one.cause.host}
    status = Status(StatusCode.OK) if good else Status(StatusCode.ERROR, one.state)

    def context(phase: str = "") -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        identity = (trace_id(run, one.number), span_id(run, one.number, phase))
        return SpanContext(*identity, is_remote=False, trace_flags=sampled)

    def span(name: str, begin_ns: int, until_ns: int, phase: str = "") -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context(phase),
            parent=context() if phase else None,
            resource=resource,
            attributes={} if phase else about,
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if phase else status,
            start_time=begin_ns,
            end_time=until_ns,
            instrumentation_scope=_SCOPE,
        )

    yield span(f"incident {one.cause.kind}", one.t_ns, end_ns)
    at_ns = one.t_ns
    for phase in PHASES:
        spent_ns = round(one.phases_ms.get(phase, 0.0) * _MS)
        if spent_ns:
            yield span(phase, at_ns, at_ns + spent_ns, phase)
        at_ns += spent_ns
