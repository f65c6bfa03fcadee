"""Sentinels that see all ranks: pure rules over what the ranks report (docs/sentinels.md)."""
