"""Pure decisions: no torch, socket, file, clock, thread or randomness inside."""
