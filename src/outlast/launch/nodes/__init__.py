"""Runs of several nodes: flags, the meeting before the run, nodes without a controller."""
