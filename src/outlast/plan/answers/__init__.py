"""Answers of `outlast plan`: intervals, spares, comparisons, sweeps, advice."""
