"""`outlast bench`: recovery strategies on the same job and the same failures."""
