"""Verdicts from observations; each detector is a pure function with a memory of its own."""
