"""Forensic bundles: what a run that stopped has left behind, in one file without secrets."""
