"""Values without pickle, and checkpoints that are complete or do not exist."""
