"""Save intervals by tier, from the costs and failures that a run measures."""
