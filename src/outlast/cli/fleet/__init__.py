"""`outlast fleet`: what the logs of a cluster come to, one file a command."""

from __future__ import annotations

from cyclopts import App

HELP = """Which nodes are bad, what failures cost, and why jobs stopped.

Logs are read into a directory, the lake, once (`outlast fleet ingest`), and
the other commands answer from it.
"""
COMMANDS: dict[str, tuple[str, str]] = {}


def application() -> App:
    """The commands, each loaded when it is asked for."""
    app = App(name="fleet", help=HELP)
    for name, (where, said) in COMMANDS.items():
        app.command(f"outlast.cli.fleet.{where}", name=name, help=said)
    return app
