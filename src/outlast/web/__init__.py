"""Pages of runs (`outlast view`), rendered from event files alone."""
