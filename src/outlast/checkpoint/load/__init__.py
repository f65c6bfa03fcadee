"""Loads and comparisons: candidates, verified reading, relay among ranks, state fitting."""
