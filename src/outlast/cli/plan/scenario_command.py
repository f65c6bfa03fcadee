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

File = Annotated[Path | None, Parameter(help="A scenario in TOML.")]
Fields = Annotated[
    str,
    Parameter(
        help="The scenario, as in --gpus 16384 --cost 30s; `outlast plan fields` lists all.",
        allow_leading_hyphen=True,  # `--cost -5s` is refused by name
    ),
]
Json = Annotated[bool, Parameter(help="One JSON object instead of words.")]
Seed = Annotated[
    int, Parameter(help="The same seed gives the same runs, wherever they are simulated.")
]
Workers = Annotated[
    int | None, Parameter(help="Processes; where it is a matter of seconds 1, else one a core.")
]
Dask = Annotated[
    str | None,
    Parameter(
        help="Address of a Dask scheduler, as in tcp://10.0.0.1:8786, whose workers have this"
        " Outlast."
    ),
]


_NEEDED = {
    "verify": ("how often does an error come that nothing reports?", "silent_every"),
    "straggler_factor": ("which share of GPUs is slow?", "stragglers"),
    "maintenance": ("how often is the job stopped?", "maintenance_every"),
    "notice": ("how often is the job preempted?", "preempted_every"),
    "queue": ("how often is the job preempted?", "preempted_every"),
    "network_price": ("give $0 where storage is free", "storage_price"),
    "keep": ("give the price of a GB and month", "storage_price"),
    "local_restore": ("what does a save to local drives block?", "local_cost"),
    "local_survives": ("what does a save to local drives block?", "local_cost"),
}
"""Flags that need another one, and the hint that is printed without it."""


def _extra(text: str, name: str | None = None) -> Parameter:
    return Parameter(help=text, name=name)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExtraFlags:
    """Flags of `advise` for costs of a run besides failures."""

    silent_every: Annotated[
        str | None, _extra("Between errors of the job that nothing reports, as in 20d.")
    ] = None
    verify: Annotated[str, _extra("Verification of the state before a durable save.")] = "0"
    stragglers: Annotated[
        str | None, _extra("Share of GPUs that are slow in a step, as in 0.01%.")
    ] = None
    straggler_factor: Annotated[str, _extra("How many times as long a slow one takes.")] = "2"
    maintenance_every: Annotated[str | None, _extra("Between planned stops, as in 30d.")] = None
    maintenance: Annotated[str, _extra("Length of a planned stop.")] = "1h"
    preempted_every: Annotated[str | None, _extra("Between preemptions of the job.")] = None
    notice: Annotated[str, _extra("Before a preemption.")] = "0"
    queue: Annotated[str, _extra("Wait for GPUs after a preemption.")] = "0"
    spot_hour: Annotated[str | None, _extra("Spot price of a GPU for an hour.")] = None
    storage_price: Annotated[str | None, _extra("A GB kept for a month, as in $0.02.")] = None
    network_price: Annotated[str, _extra("A GB moved to storage.")] = "$0"
    keep: Annotated[int, _extra("Checkpoints that are kept.")] = 3
    local_cost: Annotated[
        str | None, _extra("What a save to local drives blocks: are they worth a level?")
    ] = None
    local_restore: Annotated[str, _extra("Restore of the whole job from local drives.")] = "1min"
    local_survives: Annotated[
        str, _extra("Share of failures that a save on local drives survives.")
    ] = "50%"

    def extra_inputs(self) -> ExtraInputs:
        """Parse the flags. Raises ConfigError, UsageError, naming the invalid one."""

        def seconds(flag: str, text: str | None, *, least_s: float = 0.0) -> float | None:
            found = None if text is None else span(f"--{flag} {text}", text)
            if found is not None and found <= least_s and flag.endswith("every"):
                raise UsageError(f"--{flag} {text} must be above 0")
            return found

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


def show(found: Answer, *, json: bool) -> None:
    """Print the whole answer, as one JSON object or for people."""
    if json:
        print_json(found)
        return
    echo(Text(found.question, "bold"))
    echo(Text(f"failures: {found.failures}", "dim"))
    echo(quantity_table(found.quantities))
    remarks(found)


def quantity_table(quantities: list[Quantity]) -> Table:
    """Return a table of quantities with their 90 % band and source."""
    grid = table(
        text_column(), number_column("figure"), number_column("90 % band"), text_column("source")
    )
    for one in quantities:
        source = f"{one.how}: {one.source}" if one.source else one.how
        counted = f" {one.unit}" if one.unit in COUNTED and math.isfinite(one.value) else ""
        grid.add_row(one.name, format_quantity(one.value, one.unit) + counted, band(one), source)
    return grid


def remarks(found: Answer | Sizing) -> None:
    """Print warnings and assumptions."""
    for warning in found.warnings:
        echo(Text(f"warning: {warning}", "yellow"))
    if found.assumed:
        texts = ", ".join(f"--{one.key} {one.text}" for one in found.assumed)
        echo(Text(f"assumed: {texts}", "dim"))


def band(one: Quantity) -> str:
    """Format the 90 % band of a quantity; "" where it has none."""
    if one.low is None or one.high is None:
        return ""
    return f"{format_quantity(one.low, one.unit)} to {format_quantity(one.high, one.unit)}"


def check_fields(fields: dict[str, str], command: Callable[..., int]) -> dict[str, str]:
    """Return the fields. Raises UsageError for a misspelt flag of the command's own."""
    own = [
        one.name for one in signature(command).parameters.values() if one.kind is one.KEYWORD_ONLY
    ]
    for name in fields:
        key = name.replace("_", "-")
        close = get_close_matches(key, [*KEYS, *own], n=1)
        if key not in KEYS and close and close[0] in own:
            raise UsageError(f"flag --{key} is not known: did you mean --{close[0]}?")
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
        raise UsageError(f"--figure {path}: draw as one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--figure {path}: there is no directory {path.absolute().parent}")
    if path.is_dir():
        raise UsageError(f"--figure {path} is a directory")
    return path
