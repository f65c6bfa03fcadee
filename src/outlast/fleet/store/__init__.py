"""The lake: records of a cluster on disk, their ingestion and selection."""
