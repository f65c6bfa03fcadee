"""Readers of cluster logs: format detection, column mappings and one reader a format."""
