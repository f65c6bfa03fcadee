"""Messages, channels and shared memory between the processes of a run."""
