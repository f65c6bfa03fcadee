"""`outlast plan`: questions about failures, one file a command."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""What failures will cost a run, what to set and what to buy against it.

A scenario is said by flags, by a TOML file with the same keys, or by both
(flags go first): `outlast plan interval --gpus 16384 --cost 30s`, or
`outlast plan interval my.toml`. Quantities have units: 5min, 50kh, 1.5TB,
0.5%, 100k. `outlast plan fields` lists all of them, with what is assumed
where nothing is said.

Exit codes:

* {EXIT_DONE}: answered
* {EXIT_USER_ERROR}: a file that cannot be read or written, or a part of a sweep that failed
* {EXIT_USAGE}: a field that cannot be, or an extra is missing
* {EXIT_INTERRUPTED}: interrupted; what was done is printed
"""
COMMANDS = {
    "advise": ("advise:advise", "What to set, what it costs, what to buy next."),
    "compare": ("compare:compare", "Which strategy, and what it comes to."),
    "interval": ("interval:interval", "How often to save, and how much it matters."),
    "ettr": ("ettr:ettr", "Which share of time is training, and what it takes to reach one."),
    "replicas": ("replicas:replicas", "How many copies in memory, and how far they carry."),
    "size": ("sizing:size", "State, work and save times, from the model and the machine."),
    "spares": ("spares:spares", "How many nodes should stand by."),
    "simulate": ("simulate:simulate", "Many runs of one strategy, by quantiles."),
    "story": ("story:story", "One run, told as `outlast explain` reads it."),
    "sweep": ("sweep:sweep", "One or two fields varied."),
    "fields": ("fields:fields", "What a scenario may say, and what is assumed."),
    "presets": ("presets:presets", "The published failure rates."),
    "reproduce": ("reproducing:reproduce", "Published tables and figures, computed again."),
}
