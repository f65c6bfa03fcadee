"""`outlast trace`: a run as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import msgspec

from outlast.atomic_files import write_new
from outlast.cli.newest_run import chosen_run
from outlast.cli.output_stream import echo, write
from outlast.errors import EXIT_DONE
from outlast.telemetry.chrome_trace import trace_events
from outlast.telemetry.event_store import life_of
from outlast.telemetry.history.run_history import read_history


def trace(run_dir: Path | None = None, *, out: Path | None = None) -> int:
    """Write a run as a trace, which Perfetto opens.

    https://ui.perfetto.dev and chrome://tracing show it: each rank's time,
    incidents with their phases, checkpoints, findings and copies of state.

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start (default: the newest).
    out
        New file for the trace (default: stdout).
    """
    if out is not None:
        write_new(out, None)
    run_dir = chosen_run(run_dir)
    history = read_history(run_dir)
    running = life_of(run_dir, history.events) == "running"
    found = list(trace_events(history, running=running))
    text = msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": found}).decode()
    if out is None:
        write(text + "\n")
    else:
        write_new(out, text)
        echo(f"{out}: {len(found):,} events; https://ui.perfetto.dev opens it")
    return EXIT_DONE
