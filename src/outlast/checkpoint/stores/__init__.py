"""Places where checkpoints lie: folders and buckets, their catalog, their owner, their chunks."""
