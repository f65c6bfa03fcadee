"""Frames, channels and shared memory between the processes of a run."""
