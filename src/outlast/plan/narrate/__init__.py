"""Narration of one replication, decided by the real controller (docs/plan.md)."""
