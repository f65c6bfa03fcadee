"""Terms of a run's controllers: stores, records, and the right to act."""
