"""Commands of `outlast slurm`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_USAGE

HELP = f"""Start runs as Slurm jobs that requeue and resume themselves.

Exit codes:

* {EXIT_DONE}: done
* {EXIT_USAGE}: wrong usage, or sbatch refused the job; nothing was submitted
"""
COMMANDS = {"submit": ("submit:submit", "Submit `outlast run` as a Slurm job that resumes itself.")}
