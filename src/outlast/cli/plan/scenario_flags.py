"""Flags that several `outlast plan` commands share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from outlast import quantities
from outlast.errors import UsageError
from outlast.plan.answers.extra_costs import ExtraInputs
from outlast.plan.model.scenario import span

if TYPE_CHECKING:
    from outlast.plan.simulate.part_executors import PartExecutor

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
    from outlast.plan.simulate.part_executors import dask_executor, local_executor
    from outlast.process_pool import cores

    if address is not None:
        if workers is not None:
            raise UsageError("--workers and --dask exclude each other; give one of them")
        return dask_executor(address)
    if workers is None:
        return local_executor(cores() if failures > FAILURES_HERE else 1)
    if not 1 <= workers <= WORKERS_MAX:
        raise UsageError(f"--workers {workers}: from 1 to {WORKERS_MAX:,}")
    return local_executor(workers)
