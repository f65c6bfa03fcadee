"""Node checks: samples, their judgement, drains."""
