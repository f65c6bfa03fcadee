"""Compiled Monte Carlo simulation of a job, and the statistics of its runs."""
