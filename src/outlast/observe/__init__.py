"""What happened to a run: the event store, incidents, time accounting, and how they are shown."""
