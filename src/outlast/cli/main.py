"""The `outlast` command: dispatch to commands, and error output."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.text import Text

from outlast import __version__
from outlast.cli import ckpt, fleet, k8s, plan, policy, slurm
from outlast.cli.output_stream import Printer, finish, mute, settle
from outlast.errors import (
    EXIT_DONE,
    EXIT_GAVE_UP,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    EXIT_USER_ERROR,
    GaveUpError,
    OutlastError,
    UsageError,
)

if TYPE_CHECKING:
    from cyclopts import App

HELP = f"""Keep PyTorch training runs alive through hardware failures, with bit-identical results.

Exit codes:

* {EXIT_DONE}: done
* {EXIT_USER_ERROR}: the script's own error, or a run directory that cannot be used
* {EXIT_USAGE}: wrong usage, or an optional package (extra) is missing; nothing was started
* {EXIT_GAVE_UP}: all ways to recover failed
* {EXIT_INTERRUPTED}: interrupted; `outlast run --resume RUN_DIR` resumes the run
"""
# Module and summary of each command, so that a list of commands imports none of them.
COMMANDS = {
    "bench": (
        "bench.strategy_race:bench",
        "Compare recovery strategies on the same job under the same kills.",
    ),
    "bundle": (
        "bundle:bundle",
        "Write a forensic bundle of a run: what it left behind, without secrets.",
    ),
    "check": (
        "check:check",
        "Check this node: GPUs, links, file systems, kernel log, memory, services.",
    ),
    "demo": (
        "demo:demo",
        "Train a small GPT with injected faults, and compare it with an undisturbed run.",
    ),
    "doctor": (
        "doctor.doctor:doctor",
        "List the lines of a training script that a port to Outlast changes.",
    ),
    "drain": ("drain:drain", "Move a rank, or all ranks of a host, of a running job to spares."),
    "events": ("reports.run_reports:events", "List a run's events by time, over all its workers."),
    "explain": (
        "reports.run_reports:explain",
        "Explain incidents: cause, decision, reason and cost.",
    ),
    "log": (
        "reports.log:log",
        "Write a run's metrics and incidents to TensorBoard, W&B, MLflow or trackio.",
    ),
    "replay": (
        "replay:replay",
        "Repeat steps of a run twice, and find nondeterministic operations.",
    ),
    "report": ("reports.report:report", "Write a run's figure and page into files."),
    "roll": (
        "roll:roll",
        "Let hosts of a running job leave for maintenance and come back in turn.",
    ),
    "summary": (
        "reports.run_reports:summary",
        "Summarise a run: steps, incidents, time by bucket, ETTR and goodput.",
    ),
    "top": ("reports.top:top", "Show how a running job is doing, from another terminal."),
    "trace": ("reports.trace:trace", "Write a run as a trace, which Perfetto opens."),
    "view": (
        "reports.view:view",
        "Show a run, all runs of a directory, or a lake, on a page of this machine.",
    ),
}
# Modules that an extra brings, by their top-level name.
_EXTRAS = {
    "torch": "run",
    "matplotlib": "figures",
    "numba": "plan",
    "pyarrow": "plan",
    "distributed": "dask",
    "zstandard": "run",
    "prometheus_client": "metrics",
    "opentelemetry": "otlp",
    "jinja2": "fleet",
    "polars": "fleet",
}
# Extras of groups that do not need torch.
_GROUP_EXTRAS = {name: _EXTRAS | {"matplotlib": f"{name},figures"} for name in ("fleet", "plan")}
_COMMAND_EXTRAS = {
    **_GROUP_EXTRAS,
    "view": _EXTRAS | dict.fromkeys(("anyio", "jinja2", "starlette", "uvicorn"), "view"),
}
GROUPS = {
    "ckpt": ckpt,
    "fleet": fleet,
    "k8s": k8s,
    "plan": plan,
    "policy": policy,
    "slurm": slurm,
}
_EXIT_SIGINT = 130
_COMPLETION = "--install-completion"


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (the console script passes it to sys.exit)."""
    arguments = sys.argv[1:] if argv is None else argv
    code = EXIT_DONE
    try:
        code = _dispatch(arguments)
        finish()
    except OutlastError as error:
        return _framed(str(error), code_of(error))
    except BrokenPipeError:
        # The reader (`head`, a pager) closed the pipe; write nothing at exit either.
        mute(sys.stdout)
    except KeyboardInterrupt:
        return _EXIT_SIGINT
    except ImportError as error:
        missing = _missing(error, _COMMAND_EXTRAS.get(arguments[0], _EXTRAS))
        if missing is None:
            raise
        name, extra = missing
        return _framed(
            f"`outlast {_words(arguments)}` needs {name}, which is not installed; nothing was"
            f" started. Add it with: pip install 'outlast[{extra}]'",
            EXIT_USAGE,
        )
    return code


def code_of(error: OutlastError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, UsageError):
        return EXIT_USAGE
    return EXIT_GAVE_UP if isinstance(error, GaveUpError) else EXIT_USER_ERROR


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["run"]:
        # A parser as torchrun's owns these flags: they must not pass through another one.
        return import_module("outlast.cli.run").run(arguments[1:])
    commands = sorted(["run", *COMMANDS, *GROUPS])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        from difflib import get_close_matches  # rarely needed

        close = get_close_matches(arguments[0], commands, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"unknown command {arguments[0]!r}{meant} (commands: {', '.join(commands)})"
        )
    from cyclopts import CycloptsError  # `run` starts without it

    try:
        result = application(arguments)(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise UsageError(
            f"{error}\n`outlast {_words(arguments)} --help` shows its usage"
        ) from error
    return result if isinstance(result, int) else EXIT_DONE


def _words(arguments: list[str]) -> str:
    """Return the names of the command: its group and its own."""
    group = GROUPS.get(arguments[0])
    inner = group and arguments[1:] and arguments[1] in group.COMMANDS
    return " ".join(arguments[: 2 if inner else 1])


def application(arguments: Sequence[str] = ()) -> App:
    """Return the application with all commands other than `run`, each loaded lazily.

    A list of commands has a line for each; the help of the one in the arguments is its docstring.
    """
    from cyclopts import App

    app = App(
        name="outlast",
        help=HELP,
        version=__version__,
        result_action="return_value",
        help_format="plaintext",  # Markdown's parser would take a third of the time
        console=Printer(),
    )
    if _COMPLETION in arguments[:1]:
        from outlast.cli.shell_completion import run_signature  # rarely needed

        app.command(run_signature(), name="run")
    else:
        app.command(_run_help, name="run")
    app.register_install_completion_command(_COMPLETION)
    _add(app, "outlast.cli", COMMANDS, arguments)
    for name, group in GROUPS.items():
        inner = App(name=name, help=group.HELP)
        _add(inner, f"outlast.cli.{name}", group.COMMANDS, arguments)
        app.command(inner)
    return app


def _add(
    app: App, room: str, commands: Mapping[str, tuple[str, str]], arguments: Sequence[str]
) -> None:
    for name, (where, line) in commands.items():
        # cyclopts takes the docstring by default.
        app.command(f"{room}.{where}", name=name, help=None if name in arguments else line)


def _run_help() -> int:
    """Launch a training script as with torchrun; `outlast run --help` shows its flags."""
    return _dispatch(["run", "--help"])


def _missing(error: ImportError, extras: dict[str, str]) -> tuple[str, str] | None:
    """Return the missing module and the extra that installs it."""
    # cyclopts wraps import errors of a command's module.
    cause = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    name = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
    top = name.partition(".")[0]
    return (top, extras[top]) if top in extras else None


def _framed(message: str, code: int) -> int:
    """Print one error, framed, on stderr."""
    with contextlib.suppress(OSError):  # stderr is closed: the exit code remains
        Printer(stderr=True).print(
            Panel(Text(message), title="outlast", title_align="left", border_style="red")
        )
    settle()
    return code


if __name__ == "__main__":
    sys.exit(main())
