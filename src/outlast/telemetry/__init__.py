"""Records of a run: event store, incidents, time accounting, and their views."""
