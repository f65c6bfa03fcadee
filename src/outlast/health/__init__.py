"""Node checks: pure functions from a sample to findings, and the probes that take samples."""
