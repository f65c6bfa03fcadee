"""The script's code above `outlast.init()`: the files that it writes, the seat that it needs.

A spare executes this code before it has a rank, and a worker that joins a running job executes it
in the middle of the job.
"""
