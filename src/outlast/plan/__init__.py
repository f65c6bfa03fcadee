"""What failures will cost a run, and what to set and buy against it (docs/plan.md)."""
