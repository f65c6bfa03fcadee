"""Upkeep of stores behind saves: retention, pruning, copies to durable targets.

In threads of the launcher (`threads`), or in a process beside a trainer's (`client`, `process`).
"""
