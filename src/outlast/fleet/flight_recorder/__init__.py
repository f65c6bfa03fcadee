"""Root cause of a hang, from the flight-recorder dumps of a job's ranks."""
