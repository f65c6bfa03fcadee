"""Simulation of a job: compiled, many runs with their statistics; narrated, one run as events."""
