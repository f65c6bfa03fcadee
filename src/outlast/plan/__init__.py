"""Cost of failures for a run, and settings that reduce it (docs/plan.md)."""
