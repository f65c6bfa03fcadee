"""Batches with a position: any loader, continued elsewhere with exactly the batch that follows."""
