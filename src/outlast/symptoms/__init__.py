"""What machines say of their own trouble, read: what it is, who loses the job, what mends it."""
