"""Closed forms of the cost of failures: pure functions of plain numbers, in SI units.

Every function states its units, the regime in which it holds, and its source. Symbols: lambda is
the job's failure rate, M = 1/lambda its mean time between failures, tau the work between two saves,
C the time for which a save blocks, F the time until it is durable, R a restart, D detection and
downtime. Most functions accept arrays (`arrays`). docs/theory.md has the models of strategies and
all derivations.
"""
