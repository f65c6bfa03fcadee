"""What samples mean: one file for each part of a node, all pure."""
