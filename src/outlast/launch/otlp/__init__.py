"""Metrics and incidents of a run for OpenTelemetry, by OTLP over HTTP. docs/metrics.md."""
