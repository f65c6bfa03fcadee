"""The keeper: a process without torch that writes a trainer's copies in shared memory."""
