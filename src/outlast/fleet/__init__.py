"""What the logs of a cluster come to: which nodes are bad, what failures cost, why jobs stopped."""
