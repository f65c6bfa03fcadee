"""Simulated ranks that leave a run and come back: plans, data, and invariants."""
