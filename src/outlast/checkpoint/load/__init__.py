"""Loads and comparisons: candidates, verified reading, relay among ranks, fitting to a state."""
