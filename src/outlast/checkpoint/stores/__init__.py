"""Stores of checkpoints: folders and buckets, catalog, ownership, chunk reads."""
