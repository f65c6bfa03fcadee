"""Closed forms of the cost of failures: pure, plain numbers in and out, SI units.

Every function names its units, the regime in which it holds, and where it comes from.
Symbols: lambda is the job's failure rate, M = 1/lambda its mean time between failures, tau the work
between two saves, C what a save blocks, F what it takes until it is durable, R a restart, D
detection and downtime. Most functions take arrays, too (`arrays`). The models of strategies and
what is derived here: docs/theory.md.
"""
