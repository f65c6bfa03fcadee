"""Commands of `outlast fleet`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Find bad nodes, costs of failures, and causes of stopped jobs.

`outlast fleet ingest` reads logs once into a directory of Parquet files, the
lake. The other commands analyse the lake.

Exit codes:

* {EXIT_DONE}: done
* {EXIT_USER_ERROR}: a log or the lake cannot be read or written; the lake is unchanged
* {EXIT_USAGE}: wrong usage, or an optional package (extra) is missing; nothing was read
* {EXIT_INTERRUPTED}: interrupted; the lake is unchanged
"""
COMMANDS: dict[str, tuple[str, str]] = {
    "ingest": ("log_commands:ingest", "Read logs into a lake (a directory of Parquet files)."),
    "report": (
        "analysis_commands:report",
        "Write all analyses of a lake as one HTML page with figures.",
    ),
    "lemons": ("lemons:lemons", "Rank nodes that fail more often than expected (lemons)."),
    "fit": (
        "analysis_commands:fit",
        "Measure failure and repair rates for `outlast plan --rates`.",
    ),
    "trace": ("trace:trace", "Find the root cause of a hang in flight-recorder dumps."),
    "synth": ("log_commands:synth", "Generate logs of a cluster with known ground truth."),
}
