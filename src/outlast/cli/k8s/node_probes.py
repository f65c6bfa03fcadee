"""`outlast k8s alive` and `ready`: probes of a container, by the launcher's state file."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.output_stream import echo
from outlast.errors import EXIT_DONE, EXIT_USER_ERROR
from outlast.launch.nodes import node_state


def alive(state_file: Path) -> int:
    """Test whether the launcher of this container is not stuck.

    Parameters
    ----------
    state_file
        File that the launcher writes where OUTLAST_NODE_STATE names one.
    """
    return _report(node_state.why_not_alive(state_file))


def ready(state_file: Path) -> int:
    """Test whether this node takes part in a run that answers.

    Parameters
    ----------
    state_file
        File that the launcher writes where OUTLAST_NODE_STATE names one.
    """
    return _report(node_state.why_not_ready(state_file))


def _report(reason: str) -> int:
    if reason:
        echo(reason)
    return EXIT_USER_ERROR if reason else EXIT_DONE
