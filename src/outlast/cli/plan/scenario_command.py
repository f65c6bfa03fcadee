"""Parts that all commands of a scenario share: flags, and the output of answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from outlast import quantities
from outlast.cli.output_stream import echo, print_json
from outlast.errors import UsageError
from outlast.plan.answers.extra_costs import ExtraInputs
from outlast.plan.model.answer_values import Answer, Quantity, format_quantity
from outlast.plan.model.model_sizing import Sizing
from outlast.plan.model.scenario import KEYS, span
from outlast.terminal_tables import number_column, table, text_column

if TYPE_CHECKING:
    from outlast.process_pool import PartExecutor

WORKERS_MAX = 1024
FAILURES_HERE = 10_000_000  # some seconds; above, processes are worth their start

File = Annotated[Path | None, Parameter(help="Scenario as a TOML file.")]
Fields = Annotated[
    str,
    Parameter(
        help="Any field of the scenario, for example --gpus 16384 --cost 30s. `outlast plan"
        " fields` lists all, with defaults.",
        allow_leading_hyphen=True,  # `--cost -5s` is refused by name
    ),
]
Json = Annotated[bool, Parameter(help="Print one JSON object instead of text.")]
Seed = Annotated[
    int,
    Parameter(help="Random seed. The same seed gives the same runs, on any number of processes."),
]
Workers = Annotated[
    int | None,
    Parameter(
        help="Number of processes (default: 1 for a simulation of seconds, else one per core)."
    ),
]
Dask = Annotated[
    str | None,
    Parameter(
        help="Simulate on a Dask cluster: address of its scheduler, for example"
        " tcp://10.0.0.1:8786. Its workers need the same version of Outlast."
    ),
]


_NEEDED = {
    "verify": ("the mean time between undetected errors", "silent_every"),
    "straggler_factor": ("the share of slow GPUs", "stragglers"),
    "maintenance": ("the time between planned stops", "maintenance_every"),
    "notice": ("the time between preemptions", "preempted_every"),
    "queue": ("the time between preemptions", "preempted_every"),
    "network_price": ("the storage price (give $0 for free storage)", "storage_price"),
    "keep": ("the price of a GB and month", "storage_price"),
    "local_restore": ("the time that a save to local drives blocks", "local_cost"),
    "local_survives": ("the time that a save to local drives blocks", "local_cost"),
}
"""Flags that need another one, with the name of its value for the error message."""


def _extra(text: str, name: str | None = None) -> Parameter:
    return Parameter(help=text, name=name)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExtraFlags:
    """Flags of `advise` for costs of a run besides failures."""

    silent_every: Annotated[
        str | None,
        _extra(
            "Mean time between undetected errors (silent corruption) in the job, for example 20d."
        ),
    ] = None
    verify: Annotated[str, _extra("Time to verify the state before a durable save.")] = "0"
    stragglers: Annotated[
        str | None, _extra("Share of GPUs that are slow in a step, for example 0.01%.")
    ] = None
    straggler_factor: Annotated[
        str, _extra("Step time of a slow GPU, as a multiple of the normal one.")
    ] = "2"
    maintenance_every: Annotated[
        str | None, _extra("Time between planned stops, for example 30d.")
    ] = None
    maintenance: Annotated[str, _extra("Length of a planned stop.")] = "1h"
    preempted_every: Annotated[
        str | None, _extra("Mean time between preemptions of the job, for example 2d.")
    ] = None
    notice: Annotated[str, _extra("Notice before a preemption, for example 2min.")] = "0"
    queue: Annotated[str, _extra("Queue time after a preemption.")] = "0"
    spot_hour: Annotated[str | None, _extra("Spot price of a GPU-hour, for example $1.2.")] = None
    storage_price: Annotated[
        str | None, _extra("Storage price of a GB and month, for example $0.02.")
    ] = None
    network_price: Annotated[str, _extra("Network price of a GB sent to storage.")] = "$0"
    keep: Annotated[int, _extra("Number of checkpoints kept in storage.")] = 3
    local_cost: Annotated[
        str | None,
        _extra(
            "Time that a save to local drives blocks training. With it, the"
            " answer has a level of local checkpoints."
        ),
    ] = None
    local_restore: Annotated[str, _extra("Time to restore the job from local drives.")] = "1min"
    local_survives: Annotated[
        str, _extra("Share of failures after which a save on local drives can be restored.")
    ] = "50%"

    def extra_inputs(self) -> ExtraInputs:
        """Parse the flags. Raises ConfigError, UsageError, naming the invalid one."""

        def seconds(flag: str, text: str | None, *, least_s: float = 0.0) -> float | None:
            value_s = None if text is None else span(f"--{flag} {text}", text)
            if value_s is not None and value_s <= least_s and flag.endswith("every"):
                raise UsageError(f"--{flag} {text} must be above 0")
            return value_s

        def price(flag: str, text: str | None) -> float | None:
            return None if text is None else quantities.price(f"--{flag} {text}", text)

        for key, (first, needed) in _NEEDED.items():
            if getattr(self, key) != getattr(type(self), key) and getattr(self, needed) is None:
                flag, other = key.replace("_", "-"), needed.replace("_", "-")
                raise UsageError(f"--{flag} needs --{other}: {first}")
        slow = self.stragglers
        if self.keep < 0:
            raise UsageError(f"--keep {self.keep}: 0 or more")
        return ExtraInputs(
            silent_mtbf_s=seconds("silent-every", self.silent_every),
            verify_s=seconds("verify", self.verify) or 0.0,
            straggler_share=None
            if slow is None
            else quantities.share(f"--stragglers {slow}", slow),
            straggler_factor=quantities.number(
                f"--straggler-factor {self.straggler_factor}", self.straggler_factor
            ),
            maintenance_every_s=seconds("maintenance-every", self.maintenance_every),
            maintenance_s=seconds("maintenance", self.maintenance) or 0.0,
            preempted_every_s=seconds("preempted-every", self.preempted_every),
            notice_s=seconds("notice", self.notice) or 0.0,
            queue_s=seconds("queue", self.queue) or 0.0,
            usd_per_spot_hour=price("spot-hour", self.spot_hour),
            usd_per_gb_month=price("storage-price", self.storage_price),
            usd_per_gb_moved=price("network-price", self.network_price) or 0.0,
            kept=self.keep,
            local_cost_s=seconds("local-cost", self.local_cost),
            local_restore_s=seconds("local-restore", self.local_restore) or 0.0,
            local_survives=quantities.share(
                f"--local-survives {self.local_survives}", self.local_survives
            ),
        )


def execution_place(
    workers: int | None, address: str | None, failures: float
) -> AbstractContextManager[PartExecutor]:
    """Return the executor for a simulation of so many failures.

    `--workers` and `--dask` decide; without them, this process if it is a matter of seconds. Raises
    UsageError.
    """
    from outlast.process_pool import cores, dask_executor, local_executor

    if address is not None:
        if workers is not None:
            raise UsageError("--workers and --dask exclude each other; give one of them")
        return dask_executor(address)
    if workers is None:
        return local_executor(cores() if failures > FAILURES_HERE else 1)
    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"--workers {workers}: from 1 to {WORKERS_MAX:,}")
    return local_executor(workers)


COUNTED = ("GPUs", "nodes")
FORMATS = (".svg", ".png", ".pdf")


def show(answer: Answer, *, json: bool) -> None:
    """Print the whole answer, as one JSON object or for people."""
    if json:
        print_json(answer)
        return
    echo(Text(answer.question, "bold"))
    echo(Text(f"failures: {answer.failures}", "dim"))
    echo(quantity_table(answer.quantities))
    remarks(answer)


def quantity_table(quantities: list[Quantity]) -> Table:
    """Return a table of quantities with their 90 % band and source."""
    grid = table(
        text_column(), number_column("figure"), number_column("90 % band"), text_column("source")
    )
    for quantity in quantities:
        source = f"{quantity.how}: {quantity.source}" if quantity.source else quantity.how
        counted = (
            f" {quantity.unit}"
            if quantity.unit in COUNTED and math.isfinite(quantity.value)
            else ""
        )
        grid.add_row(
            quantity.name,
            format_quantity(quantity.value, quantity.unit) + counted,
            band(quantity),
            source,
        )
    return grid


def remarks(answer: Answer | Sizing) -> None:
    """Print warnings and assumptions."""
    for warning in answer.warnings:
        echo(Text(f"warning: {warning}", "yellow"))
    if answer.assumed:
        texts = ", ".join(f"--{assumption.key} {assumption.text}" for assumption in answer.assumed)
        echo(Text(f"assumed: {texts}", "dim"))


def band(quantity: Quantity) -> str:
    """Format the 90 % band of a quantity; "" where it has none."""
    if quantity.low is None or quantity.high is None:
        return ""
    ends = (format_quantity(end, quantity.unit) for end in (quantity.low, quantity.high))
    return " to ".join(ends)


def check_fields(fields: dict[str, str], command: Callable[..., int]) -> dict[str, str]:
    """Return the fields. Raises UsageError for a misspelt flag of the command's own."""
    own = [
        parameter.name
        for parameter in signature(command).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    for name in fields:
        key = name.replace("_", "-")
        close = get_close_matches(key, [*KEYS, *own], n=1)
        if key not in KEYS and close and close[0] in own:
            raise UsageError(f"unknown flag --{key}; did you mean --{close[0]}?")
    return fields


def check_picture(path: Path | None, *modules: str) -> Path | None:
    """Check a figure's path before anything is computed, and return it.

    `modules`: the modules that the figure needs besides matplotlib. Raises UsageError;
    ModuleNotFoundError where one is not installed.
    """
    if path is None:
        return None
    for name in ("matplotlib", *modules):
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if path.suffix not in FORMATS:
        raise UsageError(f"--figure {path}: the suffix must be one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--figure {path}: there is no directory {path.absolute().parent}")
    if path.is_dir():
        raise UsageError(f"--figure {path} is a directory")
    return path
