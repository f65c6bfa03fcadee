"""`outlast plan size`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outlast import amounts
from outlast.cli.plan.flags import Json
from outlast.cli.plan.saying import table
from outlast.cli.stream import as_json, say
from outlast.drafts import write_new
from outlast.errors import EXIT_DONE, ConfigError
from outlast.plan.scenario import span
from outlast.plan.sizing import Device, Machine, Model, Precision, peak_flops, sizing, tokens_of

_TIMES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def _flag(text: str) -> Parameter:
    return Parameter(help=text)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """GPUs, links and storage, as flags."""

    gpus: Annotated[str, _flag("GPUs of the job, as in 16384 or 16k.")]
    device: Annotated[Device, _flag("The GPU, for its peak rate.")] = "h100"
    mfu: Annotated[str, _flag("Share of the peak rate that training reaches.")] = "40%"
    host_bandwidth: Annotated[str, _flag("From a GPU to its host's memory.")] = "20GB/s"
    network_bandwidth: Annotated[str, _flag("Of a GPU to other hosts.")] = "25GB/s"
    storage_bandwidth: Annotated[str, _flag("Of the whole file system.")] = "100GB/s"
    startup: Annotated[str, _flag("Of the job, without reading its state.")] = "5min"

    def machine(self, precision: Precision) -> Machine:
        """Read the flags. Raises ConfigError, UsageError, naming the one that cannot be."""

        def rate(flag: str, text: str) -> int:
            return amounts.rate(f"--{flag} {text}", text)

        gpus = amounts.count(f"--gpus {self.gpus}", self.gpus)
        mfu = amounts.share(f"--mfu {self.mfu}", self.mfu)
        for flag, text, value in (("gpus", self.gpus, gpus), ("mfu", self.mfu, mfu)):
            if not value:
                raise ConfigError(f"--{flag} {text} must be above 0")
        return Machine(
            gpus=gpus,
            flops=peak_flops(self.device, precision),
            mfu=mfu,
            host_bytes_per_s=rate("host-bandwidth", self.host_bandwidth),
            network_bytes_per_s=rate("network-bandwidth", self.network_bandwidth),
            storage_bytes_per_s=rate("storage-bandwidth", self.storage_bandwidth),
            startup_s=span(f"--startup {self.startup}", self.startup),
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Parameters and tokens, as flags."""

    parameters: Annotated[str, _flag("Of the model, as in 405B.")]
    active: Annotated[
        str | None, _flag("Parameters that a token passes through, in a mixture of experts.")
    ] = None
    tokens: Annotated[
        str | None, _flag("To train on, as in 15.6T; else 20 a parameter (Hoffmann et al. 2022).")
    ] = None
    batch_tokens: Annotated[str, _flag("Tokens of a step.")] = "4M"
    precision: Annotated[
        Precision,
        _flag("What is saved of a parameter, with Adam: bf16 14 bytes, fp32 12, fp8 13."),
    ] = "bf16"
    replica_gpus: Annotated[
        str | None, _flag("GPUs that hold the model once; else all of them.")
    ] = None

    def model(self, gpus: int) -> Model:
        """Read the flags. Raises ConfigError, naming the one that cannot be."""
        parameters, held = _large("--parameters", self.parameters), gpus
        if self.replica_gpus is not None:
            held = amounts.count(f"--replica-gpus {self.replica_gpus}", self.replica_gpus)
        if not held:
            raise ConfigError(f"--replica-gpus {self.replica_gpus} must be above 0")
        return Model(
            parameters=parameters,
            active=_large("--active", self.active) if self.active else parameters,
            tokens=_large("--tokens", self.tokens) if self.tokens else tokens_of(parameters),
            precision=self.precision,
            batch_tokens=_large("--batch-tokens", self.batch_tokens),
            replica_gpus=held,
        )


def size(*, of: ModelFlags, on: MachineFlags, out: Path | None = None, json: Json = False) -> int:
    """State, work and save times, from the model and the machine.

    A scenario for the other commands: `outlast plan size ... --out run.toml`,
    then `outlast plan advise run.toml`.

    Parameters
    ----------
    out
        Write a scenario into this new TOML file.
    """
    machine = on.machine(of.precision)
    model = of.model(machine.gpus)
    if out:
        write_new(out, None)
    found = sizing(model, machine)
    if out:
        lines = (f"{key} = {_toml(value)}" for key, value in found.scenario.items())
        write_new(out, "\n".join(["# Made by `outlast plan size`.", *lines, ""]))
    if json:
        as_json(found)
        return EXIT_DONE
    say(table(found.quantities))
    say("by bandwidth alone; what runs measured is more: `outlast fleet fit`")
    if out:
        say(f"written to {out}; next: outlast plan advise {out}")
    return EXIT_DONE


def _large(flag: str, text: str) -> float:
    """A number above 0, as in 405B or 15.6T. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,20})?)\s*([kKMBGT]?)", text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{flag} {text} needs a number above 0, as in 405B or 15.6T")
    return float(match[1]) * _TIMES[match[2]]


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
