"""Sentinels inside a worker: detectors over one rank's numbers (docs/sentinels.md)."""
