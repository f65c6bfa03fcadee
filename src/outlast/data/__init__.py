"""Batch sources with an exact position, from which any process continues with the next batch."""
