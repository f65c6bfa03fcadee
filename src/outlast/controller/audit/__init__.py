"""Audits: comparison of the bytes of replicas, verdicts, and bars on copies."""
