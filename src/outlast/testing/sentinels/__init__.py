"""Synthetic series, by which detectors are judged."""
