"""Start, resumption, restart and end of a run."""
