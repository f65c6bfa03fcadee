"""Analyses of a fleet's tables: exposure, failures, nodes, lemons."""
