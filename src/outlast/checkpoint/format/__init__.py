"""The checkpoint format: manifests and commit records, values without pickle, tensor boxes."""
