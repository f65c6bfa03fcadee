"""`outlast run`: torchrun's command line, for a run that outlasts its workers."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from outlast.cli.output_stream import Printer, echo_error, settle, write
from outlast.cli.resumed_run import resumed_plan
from outlast.config import process_environment
from outlast.controller.inputs import EndRun
from outlast.errors import EXIT_DONE, OutlastError
from outlast.launch import torchrun_arguments
from outlast.launch.launcher import launch
from outlast.launch.nodes import node_start
from outlast.launch.notify.run_notifier import notifying
from outlast.launch.outlast_flags import MetricsFlags
from outlast.launch.run_display import DetachedDisplay, Display
from outlast.launch.torchrun_arguments import RunPlan
from outlast.telemetry.live_view import LineDisplay, LiveDisplay, display
from outlast.text_formatting import frame_cause

if TYPE_CHECKING:
    from outlast.telemetry.metrics.metrics_endpoint import MetricsEndpoint
    from outlast.telemetry.metrics.run_metrics import RunMetrics


def run(argv: list[str]) -> int:
    """Run `argv` (the arguments of `outlast run`) and return the exit code, see errors.py.

    Raises OutlastError when nothing could be started, or the launcher itself failed. Once the run
    has ended, its own exit code is returned, even if its output cannot be printed.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):  # argparse ignores output errors
            plan = resumed_plan(argv) or torchrun_arguments.parse(argv)
    except SystemExit:  # --help
        write(output.getvalue())
        return EXIT_DONE
    if plan.check_settings:
        from outlast.health.check_settings import (
            read_settings,  # an error in it is reported before anything starts
        )

        read_settings(Path(plan.check_settings))
    _greet(plan)
    # With --json, stdout belongs to the summary.
    lines = sys.stderr if plan.json else sys.stdout

    with (
        notifying(plan.notify, process_environment(), echo_error) as notified,
        _measuring(plan.metrics) as measured,
    ):

        def show(path: Path) -> DetachedDisplay:
            view = display(path, plain=plan.plain, lines=lines)
            return DetachedDisplay(notified(measured(view), view.feed, path))

        if plan.node.total > 1:
            end, leads = node_start.serve(plan, show)
            if leads:
                conclude(end, Path(plan.run_dir), as_json=plan.json)
            elif framed := frame_cause(end.outcome, end.cause):
                echo_error(framed)
            settle()
        else:
            end, run_dir = launch(plan, show)
            conclude(end, run_dir, as_json=plan.json)
    return end.exit_code


def _greet(plan: RunPlan) -> None:
    """Print where the run is, and what may be typed next."""
    echo_error(f"outlast: run directory {plan.run_dir}, launcher {os.getpid()}")
    if plan.node.total == 1:
        echo_error(f"outlast: watch it with: outlast top {shlex.quote(plan.run_dir)}")


@contextlib.contextmanager
def _measuring(
    flags: MetricsFlags,
) -> Iterator[Callable[[LiveDisplay | LineDisplay], Display]]:
    """Yield what makes a display offer metrics as well; without flags for them, the same one. At
    the end, wait for a scrape that sees how the run ended.

    Raises UsageError where they cannot be offered, before anything starts.
    """
    if not flags.is_on:
        yield lambda inner: inner
        return
    from outlast.telemetry.metrics.metrics_file import check_metrics_file  # an optional package
    from outlast.telemetry.metrics.run_metrics import RunMetrics

    if flags.file:
        check_metrics_file(Path(flags.file), "nothing was started")
    with _exporting(flags.otlp) as export, _serving(flags) as endpoint:

        def measure(inner: LiveDisplay | LineDisplay) -> RunMetrics:
            metrics = RunMetrics(inner, flags.file, endpoint)
            export(metrics)
            return metrics

        yield measure


@contextlib.contextmanager
def _exporting(target: str) -> Iterator[Callable[[RunMetrics], None]]:
    """Yield what begins the export of metrics by OTLP, if there is a target."""
    if not target:
        yield lambda _: None
        return
    from outlast.launch.otlp.otlp_exporter import exporting  # an optional package

    with exporting(target, process_environment(), echo_error) as export:
        yield export


@contextlib.contextmanager
def _serving(flags: MetricsFlags) -> Iterator[MetricsEndpoint | None]:
    """Yield the endpoint of metrics, if there is a port for it."""
    if flags.port < 0:
        yield None
        return
    from outlast.telemetry.metrics.metrics_endpoint import MetricsEndpoint  # an optional package

    endpoint, wait_s = MetricsEndpoint(flags.host, flags.port), 0.0
    echo_error(f"outlast: metrics at http://{flags.host}:{endpoint.port}/metrics")
    try:
        yield endpoint
        wait_s = endpoint.last_scrape_due_s()
        if wait_s >= 1:
            echo_error(f"outlast: waiting up to {wait_s:.0f} s for the last scrape of metrics")
    finally:
        with contextlib.suppress(KeyboardInterrupt):  # the run has ended: keep its exit code
            endpoint.close(wait_s)


def conclude(end: EndRun, run_dir: Path, *, as_json: bool) -> None:
    """Print the outcome of the run. Raises nothing: schedulers act on the exit code."""
    try:
        if framed := frame_cause(end.outcome, end.cause, end.decision):
            echo_error(framed)
        _summarise(run_dir, as_json=as_json)
        if end.outcome in ("gave_up", "user_error"):
            _bundle(run_dir)
    except (OSError, KeyboardInterrupt) as error:  # a full disk; or Ctrl-C, which was handled
        echo_error(f"outlast: summary incomplete ({type(error).__name__}): {_again(run_dir)}")
    except Exception as error:  # noqa: BLE001 - the run has ended: keep its exit code
        echo_error(f"outlast: no summary: {type(error).__name__}: {error}; {_again(run_dir)}")
    settle()


def _bundle(run_dir: Path) -> None:
    """Write a forensic bundle of a run that stopped in failure."""
    from outlast.launch.bundles.bundle_writer import write_bundle  # lazy, as above

    try:
        echo_error(f"outlast: what is needed to find the cause: {write_bundle(run_dir)}")
    except (OutlastError, ModuleNotFoundError) as error:
        echo_error(f"outlast: {error}")


def _again(run_dir: Path) -> str:
    return f"the events are kept; print it again with 'outlast summary {run_dir}'"


def _summarise(run_dir: Path, *, as_json: bool) -> None:
    from outlast.telemetry.run_summary import RESTART_ONLY, summarise  # lazy: a quick start
    from outlast.telemetry.summary_tables import render

    summary = summarise(run_dir)
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    with contextlib.suppress(OSError):  # a full disk: the events can reproduce it
        (run_dir / "summary.json").write_bytes(data + b"\n")
    if as_json:
        write(data.decode() + os.linesep)
    else:
        # Without a session, stdout is the script's alone, as under torchrun.
        render(summary, Printer(stderr=RESTART_ONLY in summary.notes))
