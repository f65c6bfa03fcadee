"""`outlast doctor`: the lines of a training script that a port changes, from its source alone."""
