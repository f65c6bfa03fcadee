"""The keeper: a process without torch that writes what a trainer has copied to memory."""
