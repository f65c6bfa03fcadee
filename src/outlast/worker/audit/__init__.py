"""This rank's side of audits: digests of what its replicas must hold alike (docs/protocol.md)."""
