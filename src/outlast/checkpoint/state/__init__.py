"""A training script's state: what is saved, under which names, and what belongs to one rank."""
