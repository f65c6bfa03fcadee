"""Protected state of a worker: parameters, buffers, optimizers, buckets, and their digests."""
