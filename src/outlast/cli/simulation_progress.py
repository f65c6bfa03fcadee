"""Progress and execution place of simulations: processes or a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outlast.cli.output_stream import Printer
from outlast.errors import UsageError
from outlast.plan.simulate.part_executors import PartExecutor, dask_executor, local_executor
from outlast.process_pool import cores

WORKERS_MAX = 1024
FAILURES_HERE = 10_000_000  # some seconds; above, processes are worth their start


def execution_place(
    workers: int | None, address: str | None, failures: float
) -> AbstractContextManager[PartExecutor]:
    """Return the executor for a simulation of so many failures.

    `--workers` and `--dask` decide; without them, this process if it is a matter of seconds. Raises
    UsageError.
    """
    if address is not None:
        if workers is not None:
            raise UsageError("--workers and --dask exclude each other; give one of them")
        return dask_executor(address)
    if workers is None:
        return local_executor(cores() if failures > FAILURES_HERE else 1)
    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"--workers {workers}: from 1 to {WORKERS_MAX:,}")
    return local_executor(workers)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback of the number of replications done, and of all."""
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _all: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, all_: bar.update(task, completed=done, total=all_)
