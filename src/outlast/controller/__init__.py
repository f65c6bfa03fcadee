"""Pure decisions of the controller: no torch, socket, file, clock, thread or randomness."""
