"""Commands of `outlast fleet`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Find bad nodes, costs of failures, and causes of stopped jobs.

Logs are read into a directory, the lake, once (`outlast fleet ingest`), and
the other commands answer from it.

Exit codes:

* {EXIT_DONE}: answered
* {EXIT_USER_ERROR}: a log or a lake that cannot be read or written; the lake is as it was
* {EXIT_USAGE}: wrong usage, or an extra is missing; nothing was read
* {EXIT_INTERRUPTED}: interrupted; the lake is as it was
"""
COMMANDS: dict[str, tuple[str, str]] = {
    "ingest": ("ingest:ingest", "Read logs into a lake, which the other commands analyse."),
    "report": ("report:report", "Write all analyses of a lake as one page with figures."),
    "lemons": ("lemons:lemons", "Rank nodes that fail more often than chance explains."),
    "fit": ("fit:fit", "Measure rates of failure and repair for `outlast plan --rates`."),
    "trace": ("trace:trace", "Find the root cause of a hang in flight-recorder dumps."),
    "synth": ("synth:synth", "Generate logs of a cluster with known ground truth."),
}
