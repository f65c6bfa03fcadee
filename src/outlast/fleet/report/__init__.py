"""Everything that a lake answers, as one page with figures, and as JSON."""
