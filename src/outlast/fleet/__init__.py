"""Analysis of cluster logs: failures, bad nodes, costs, hangs."""
