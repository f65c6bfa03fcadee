"""Compiled Monte Carlo simulation of a job, and what its runs come to."""
