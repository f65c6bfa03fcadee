"""`outlast ckpt`: what can be done with checkpoints, one file a command."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Look at checkpoints, verify, compare, convert, copy and delete them; ask a run for one.

TARGET is a directory of checkpoints, a run directory, the directory of one
checkpoint, or a URL (s3://bucket/prefix, gs://..., az://...) of any of these
but a run. Without --step it means the newest one. Nothing below a directory
of checkpoints that leads out of it is followed.

Exit codes:

* {EXIT_DONE}: done; the checkpoints are whole, or equal
* {EXIT_USER_ERROR}: damaged, different, or something could not be read or written
* {EXIT_USAGE}: wrong usage, no such checkpoint, or an extra is missing; nothing was touched
"""
COMMANDS = {
    "ls": ("listing:ls", "List checkpoints, the newest first."),
    "show": ("show:show", "Who wrote a checkpoint, and what is in it."),
    "verify": ("verify:verify", "Read every byte and say what is damaged."),
    "diff": ("diff:diff", "Which tensors and values differ, and by how much."),
    "export": ("exporting:export", "Write DCP or safetensors."),
    "import": ("importing:import_", "Read DCP or safetensors."),
    "copy": ("copy:copy", "Copy to another directory or bucket, verified and resumable."),
    "prune": ("prune:prune", "Delete what a policy does not keep."),
    "now": ("now:now", "Ask a running job for a checkpoint, and wait for it."),
}
