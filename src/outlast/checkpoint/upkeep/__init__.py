"""Upkeep of stores behind saves: retention, pruning, copies to durable targets.

In threads of the launcher, or in a process beside a trainer (upkeep_client, upkeep_process).
"""
