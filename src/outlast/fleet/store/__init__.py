"""The lake: records of a cluster on disk, how they get there and what is selected."""
