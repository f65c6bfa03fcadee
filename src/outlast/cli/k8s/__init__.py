"""Commands of `outlast k8s`, one file each."""

from __future__ import annotations

from outlast.errors import EXIT_DONE, EXIT_USAGE, EXIT_USER_ERROR

HELP = f"""Write Kubernetes manifests for runs, and answer their probes.

Exit codes:

* {EXIT_DONE}: done; the node is alive, or ready
* {EXIT_USER_ERROR}: the node is not alive, or not ready
* {EXIT_USAGE}: wrong usage; nothing was written
"""
COMMANDS = {
    "alive": ("node_probes:alive", "Test whether the launcher of this container is not stuck."),
    "ready": (
        "node_probes:ready",
        "Test whether this node takes part in a run that answers.",
    ),
    "render": ("render:render", "Print manifests that run `outlast run` on several pods."),
}
