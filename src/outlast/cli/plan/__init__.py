"""Commands of `outlast plan`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Predict the cost of failures for a run, and compare settings and purchases.

A scenario is given by flags, by a TOML file with the same keys, or by both
(flags take precedence): `outlast plan interval --gpus 16384 --cost 30s`, or
`outlast plan interval my.toml`. Quantities have units: 5min, 50kh, 1.5TB,
0.5%, 100k. `outlast plan fields` lists all fields with their defaults.

Exit codes:

* {EXIT_DONE}: done
* {EXIT_USER_ERROR}: a file cannot be read or written, or a point of a sweep failed
* {EXIT_USAGE}: an invalid field, or an optional package (extra) is missing
* {EXIT_INTERRUPTED}: interrupted; the results so far are printed
"""
COMMANDS = {
    "advise": ("answer_commands:advise", "Recommend settings and hardware purchases, with prices."),
    "compare": ("compare:compare", "Compare the recovery strategies on one scenario."),
    "interval": (
        "answer_commands:interval",
        "Compute the best checkpoint interval and the cost of others.",
    ),
    "ettr": ("answer_commands:ettr", "Compute ETTR, the share of time spent training."),
    "replicas": (
        "answer_commands:replicas",
        "Compare numbers of in-memory copies: losses, memory, network.",
    ),
    "size": ("sizing:size", "Compute checkpoint size, training time and save times."),
    "spares": ("answer_commands:spares", "Compute the number of spare nodes with the lowest cost."),
    "simulate": (
        "simulation_commands:simulate",
        "Simulate many runs of one strategy, and print quantiles.",
    ),
    "story": (
        "simulation_commands:story",
        "Simulate one run as a run directory for `outlast explain`.",
    ),
    "sweep": ("simulation_commands:sweep", "Vary one or two fields of a scenario."),
    "fields": ("listings:fields", "List the fields of a scenario and their defaults."),
    "presets": ("listings:presets", "List published failure rates."),
    "reproduce": ("listings:reproduce", "Recompute published tables and figures."),
}
