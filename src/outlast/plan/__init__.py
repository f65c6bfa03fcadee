"""Cost of failures for a run, and the settings against it (docs/plan.md)."""
