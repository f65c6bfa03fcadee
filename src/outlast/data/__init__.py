"""Batch sources with an exact position, continued anywhere with the next batch."""
