"""History of a run in columns: phases and metrics as arrays, all other events as objects."""
