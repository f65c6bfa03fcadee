"""Saves in the trainer: division of tensors among ranks, staging, and orders to the keeper."""
