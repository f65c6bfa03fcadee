"""Two runs of a directory, side by side."""
