"""Sources of notices: requests in the run directory, signals, a watched file, cloud metadata."""
