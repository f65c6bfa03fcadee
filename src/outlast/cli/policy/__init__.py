"""Commands of `outlast policy`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Show, explain and try the recovery policies of `outlast run --policy`.

A policy orders the ways to recover from each class of failure, with conditions
and budgets. It is a preset or a TOML file: `outlast policy show exact`.

Exit codes:

* {EXIT_DONE}: done
* {EXIT_USER_ERROR}: a file is no policy, or a run directory cannot be read
* {EXIT_USAGE}: wrong usage, or an optional package (extra) is missing
"""
COMMANDS = {
    "explain": (
        "policy_explanation:explain",
        "Show the answer of a policy to each class of failure.",
    ),
    "try": (
        "policy_comparison:try_policies",
        "Compute the cost of policies on recorded or simulated failures.",
    ),
    "show": ("policy_explanation:show", "Print the file of a policy preset, or list the presets."),
}
