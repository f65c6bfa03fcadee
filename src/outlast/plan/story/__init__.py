"""One replication as a run would have lived it, decided by the real core (docs/plan.md)."""
