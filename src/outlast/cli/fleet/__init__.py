"""`outlast fleet`: what the logs of a cluster come to, one file a command."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Which nodes are bad, what failures cost, and why jobs stopped.

Logs are read into a directory, the lake, once (`outlast fleet ingest`), and
the other commands answer from it.

Exit codes:

* {EXIT_DONE}: answered
* {EXIT_USER_ERROR}: a log or a lake that cannot be read or written; the lake is as it was
* {EXIT_USAGE}: wrong usage, or an extra is missing; nothing was read
* {EXIT_INTERRUPTED}: interrupted; the lake is as it was
"""
COMMANDS: dict[str, tuple[str, str]] = {
    "ingest": ("ingest:ingest", "Read logs into a lake, from which the other commands answer."),
    "report": ("report:report", "Everything that a lake answers, as one page with figures."),
    "lemons": ("lemons:lemons", "Which nodes fail more often than chance explains."),
    "fit": ("fit:fit", "Measure rates of failure and repair for `outlast plan --rates`."),
    "trace": ("trace:trace", "Find the root cause of a hang: who did not enter what."),
    "synth": ("synth:synth", "Make the logs of a cluster whose truth is known."),
}
