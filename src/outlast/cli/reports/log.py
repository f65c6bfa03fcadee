"""`outlast log`: a run's metrics and incidents for experiment loggers."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.output_stream import echo, echo_error
from outlast.errors import EXIT_DONE
from outlast.telemetry.loggers.run_log import log_run
from outlast.text_formatting import plural


def log(run_dir: Path, *, to: str, rank: int = 0, name: str = "", follow: bool = False) -> int:
    """Write a run's metrics and incidents to TensorBoard, W&B, MLflow or trackio.

    Each committed step is written once, after recoveries and resumes too. A
    later call appends what is new (docs/loggers.md).

    Parameters
    ----------
    run_dir
        Run directory, which `outlast run` printed at its start. The run may still be running.
    to
        Target: tensorboard:DIR, wandb:PROJECT, mlflow:URI or trackio:PROJECT.
    rank
        Rank whose metrics are written (default 0).
    name
        Part of the run's name at the target, for another run there (default: none).
    follow
        Write new steps as they come, until the run ends or its launcher dies (or Ctrl-C).
    """
    logged = log_run(run_dir, to, rank=rank, name=name, follow=follow)
    steps = plural(logged.points, "step")
    echo(f"{to}: {steps} written, up to step {logged.step}, as {logged.identity}")
    if logged.died:
        echo_error(
            f"outlast: {run_dir}: the launcher died before the run ended; once it is resumed,"
            " the same `outlast log` command appends to the same run"
        )
    return EXIT_DONE
