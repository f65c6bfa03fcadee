"""Copies and parity of checkpoints in other hosts' memory, and reads from them."""
