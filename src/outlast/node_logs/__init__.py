"""Readers of node logs and diagnostics: symptom, severity and remedy of each line."""
