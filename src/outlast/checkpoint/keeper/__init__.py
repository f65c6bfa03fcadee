"""The keeper: a small process without torch that writes what a trainer has copied to memory."""
