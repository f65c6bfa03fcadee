"""Analyses of jobs: runs, ETTR, goodput, preemptions, crash loops."""
