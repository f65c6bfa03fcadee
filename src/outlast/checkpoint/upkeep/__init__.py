"""Behind saves: old checkpoints are deleted, new ones carried to durable storage.

In threads of the launcher (`threads`), or in a process beside a trainer's (`client`, `process`).
"""
