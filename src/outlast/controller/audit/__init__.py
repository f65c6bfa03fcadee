"""Audits: whether replicas hold the same bytes, who differs, and which copies are still trusted."""
