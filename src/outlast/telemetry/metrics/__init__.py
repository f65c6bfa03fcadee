"""Metrics of runs, node checks and fleets: Prometheus' endpoint and files. docs/metrics.md."""
