"""Saves in the trainer: division of tensors among ranks, staging, orders to the keeper."""
