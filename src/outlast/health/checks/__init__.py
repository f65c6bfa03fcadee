"""Checks of a node, one file each: sample, probe, judge."""
