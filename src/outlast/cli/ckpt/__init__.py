"""Commands of `outlast ckpt`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Inspect, verify, compare, convert, copy, delete and request checkpoints.

TARGET is a directory of checkpoints, a run directory, the directory of one
checkpoint, or a URL (s3://bucket/prefix, gs://..., az://...) of a checkpoint
or of a directory of them. Without --step the newest checkpoint is used.
Symbolic links that lead out of the directory are not followed.

Exit codes:

* {EXIT_DONE}: done; the checkpoints are complete, or equal
* {EXIT_USER_ERROR}: damaged, different, or a read or write failed
* {EXIT_USAGE}: wrong usage, no such checkpoint, or an extra is missing; nothing was changed
"""
COMMANDS = {
    "ls": ("catalog_commands:ls", "List checkpoints, the newest first."),
    "show": ("show:show", "Show the origin and the contents of a checkpoint."),
    "verify": ("catalog_commands:verify", "Read every byte and report damage."),
    "diff": ("diff:diff", "Compare two checkpoints by tensors and values."),
    "export": ("transfer_commands:export", "Export a checkpoint to DCP or safetensors."),
    "import": ("transfer_commands:import_", "Import a checkpoint from DCP or safetensors."),
    "copy": (
        "transfer_commands:copy",
        "Copy to another directory or bucket, verified and resumable.",
    ),
    "prune": (
        "catalog_commands:prune",
        "Delete the checkpoints that a retention policy does not keep.",
    ),
    "now": ("now:now", "Request a checkpoint from a running job, and wait for it."),
}
