"""A training script's state: parts, names of tensors, and state of a single rank."""
