"""Model of a run: scenario, failure rates, recovery ladders, predictions."""
