"""`outlast run`: torchrun's command line, a run that outlasts its workers."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from outlast.errors import OutlastError
from outlast.launch import arguments
from outlast.launch.run import frame_cause, launch
from outlast.observe.live import display


def run(argv: list[str]) -> int:
    """Run `argv` (what stands after `outlast run`) and return the exit code, see errors.py.

    Raises OutlastError when nothing could be started, or the launcher itself broke.
    """
    plan = arguments.parse(argv)
    # With --json, stdout belongs to the summary.
    lines = sys.stderr if plan.json else sys.stdout
    end, run_dir = launch(plan, lambda path: display(path, plain=plan.plain, lines=lines))
    if framed := frame_cause(end):
        sys.stderr.write(framed + "\n")
    _summarise(run_dir, as_json=plan.json)
    return end.exit_code


def _summarise(run_dir: Path, *, as_json: bool) -> None:
    from outlast.observe.summary import summarise  # after the run: its start should be quick
    from outlast.observe.tables import render

    try:
        summary = summarise(run_dir)
        data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
        with contextlib.suppress(OSError):  # a full disk: it can be made again from the events
            (run_dir / "summary.json").write_bytes(data + b"\n")
        if as_json:
            sys.stdout.write(data.decode() + os.linesep)
        else:
            render(summary)
    except OutlastError as error:
        sys.stderr.write(f"outlast: no summary: {error}\n")
