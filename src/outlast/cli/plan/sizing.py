"""`outlast plan size`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outlast import quantities
from outlast.atomic_files import write_new
from outlast.cli.output_stream import echo, print_json
from outlast.cli.plan.scenario_command import Json, quantity_table, remarks
from outlast.errors import EXIT_DONE, ConfigError
from outlast.plan.model.answer_values import Assumed, format_quantity
from outlast.plan.model.model_sizing import (
    BYTES_PER_PARAMETER,
    MEMORY_BYTES,
    Device,
    MachineSpec,
    ModelSpec,
    Precision,
    peak_flops,
    sizing,
    tokens_of,
)
from outlast.plan.model.scenario import span

_TIMES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_LEAST = {"--parameters": 1e3, "--active": 1e3, "--tokens": 1e3, "--batch-tokens": 1.0}
_MOST = 1e18
BYTES_MOST = 64.0  # of a parameter
GPUS_PER_NODE = 8
_DEFAULTS = {
    "device": "h100",
    "mfu": "40%",
    "host-bandwidth": "20GB/s",
    "network-bandwidth": "25GB/s",
    "storage-bandwidth": "100GB/s",
    "startup": "5min",
    "batch-tokens": "4M",
    "precision": "bf16",
}
"""Defaults; the answer names those that were used."""


def _flag(text: str, key: str = "") -> Parameter:
    return Parameter(help=f"{text} Default: {_DEFAULTS[key]}." if key else text)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Flags for GPUs, links and storage."""

    gpus: Annotated[str, _flag("Number of GPUs, for example 16384 or 16k.")]
    gpus_per_node: Annotated[
        str | None,
        _flag(f"Number of GPUs per node (default: {GPUS_PER_NODE}, or all if there are fewer)."),
    ] = None
    device: Annotated[Device | None, _flag("GPU model, for its peak FLOP/s.", "device")] = None
    mfu: Annotated[
        str | None,
        _flag(
            "Model FLOPs utilization (MFU), the share of peak FLOP/s that training reaches.", "mfu"
        ),
    ] = None
    host_bandwidth: Annotated[
        str | None, _flag("Bandwidth from a GPU to host memory.", "host-bandwidth")
    ] = None
    network_bandwidth: Annotated[
        str | None, _flag("Network bandwidth per GPU to other hosts.", "network-bandwidth")
    ] = None
    storage_bandwidth: Annotated[
        str | None, _flag("Total bandwidth of the file system.", "storage-bandwidth")
    ] = None
    startup: Annotated[
        str | None, _flag("Time to start the job, without loading a checkpoint.", "startup")
    ] = None

    def machine(self, precision: Precision) -> MachineSpec:
        """Parse the flags. Raises ConfigError, UsageError, naming the invalid one."""

        def text(key: str) -> str:
            return getattr(self, key.replace("-", "_")) or _DEFAULTS[key]

        def rate(key: str) -> int:
            return quantities.rate(f"--{key} {text(key)}", text(key))

        gpus = quantities.count(f"--gpus {self.gpus}", self.gpus)
        mfu = quantities.share(f"--mfu {text('mfu')}", text("mfu"))
        each = self.gpus_per_node or str(min(GPUS_PER_NODE, max(gpus, 1)))
        per_node = quantities.count(f"--gpus-per-node {each}", each)
        for key, value_text, value in (
            ("gpus", self.gpus, gpus),
            ("mfu", text("mfu"), mfu),
            ("gpus-per-node", each, per_node),
        ):
            if not value:
                raise ConfigError(f"--{key} {value_text} must be above 0")
        device = self.device or "h100"
        return MachineSpec(
            gpus=gpus,
            gpus_per_node=per_node,
            flops=peak_flops(device, precision),
            memory_bytes=MEMORY_BYTES[device],
            mfu=mfu,
            host_bytes_per_s=rate("host-bandwidth"),
            network_bytes_per_s=rate("network-bandwidth"),
            storage_bytes_per_s=rate("storage-bandwidth"),
            startup_s=span(f"--startup {text('startup')}", text("startup")),
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags for parameters and tokens."""

    parameters: Annotated[str, _flag("Number of parameters, for example 405B.")]
    active: Annotated[
        str | None, _flag("Active parameters per token, for a mixture of experts (default: all).")
    ] = None
    tokens: Annotated[
        str | None,
        _flag(
            "Training tokens, for example 15.6T (default: 20 per parameter, Hoffmann et al. 2022)."
        ),
    ] = None
    batch_tokens: Annotated[str | None, _flag("Tokens per step.", "batch-tokens")] = None
    precision: Annotated[
        Precision | None,
        _flag(
            "Precision. It sets the saved bytes per parameter with Adam (bf16 14, fp32 12, fp8"
            " 13) and the peak rate (fp8 twice bf16, fp32 as TF32 half).",
            "precision",
        ),
    ] = None
    bytes_per_parameter: Annotated[
        str | None,
        _flag("Saved bytes per parameter, optimizer state included (default: by --precision)."),
    ] = None
    replica_gpus: Annotated[
        str | None,
        _flag("GPUs that together hold one copy of the model and optimizer (default: all)."),
    ] = None

    def model(self, gpus: int) -> ModelSpec:
        """Parse the flags. Raises ConfigError, naming the invalid one."""
        parameters, replica_gpus = _large("--parameters", self.parameters), gpus
        if self.replica_gpus is not None:
            replica_gpus = quantities.count(
                f"--replica-gpus {self.replica_gpus}", self.replica_gpus
            )
        if not replica_gpus:
            raise ConfigError(f"--replica-gpus {self.replica_gpus} must be above 0")
        each_bytes: float = BYTES_PER_PARAMETER[self.precision or "bf16"]
        if (each := self.bytes_per_parameter) is not None:
            each_bytes = quantities.number(f"--bytes-per-parameter {each}", each)
            if not 0 < each_bytes <= BYTES_MOST:
                raise ConfigError(
                    f"--bytes-per-parameter {each}: must be above 0 and at most {BYTES_MOST:g}"
                )
        return ModelSpec(
            parameters=parameters,
            active=_large("--active", self.active) if self.active else parameters,
            tokens=_large("--tokens", self.tokens) if self.tokens else tokens_of(parameters),
            each_bytes=each_bytes,
            batch_tokens=_large("--batch-tokens", self.batch_tokens or _DEFAULTS["batch-tokens"]),
            replica_gpus=replica_gpus,
        )


def _assumed(
    of: ModelFlags, on: MachineFlags, model: ModelSpec, machine: MachineSpec
) -> list[Assumed]:
    """Return the flags that were not given, with their defaults."""
    follow = {
        "tokens": format_quantity(model.tokens, ""),
        "replica-gpus": str(model.replica_gpus),
        "gpus-per-node": str(machine.gpus_per_node),
    }
    values = vars(of) | vars(on)
    texts = _DEFAULTS | follow
    return [
        Assumed(key, text) for key, text in texts.items() if values[key.replace("-", "_")] is None
    ]


def size(*, of: ModelFlags, on: MachineFlags, out: Path | None = None, json: Json = False) -> int:
    """Compute checkpoint size, training time and save times.

    With --out it writes a scenario for the other commands: `outlast plan size ...
    --out run.toml`, then `outlast plan advise run.toml`.

    Parameters
    ----------
    out
        Write the scenario into this new TOML file.
    """
    machine = on.machine(of.precision or "bf16")
    model = of.model(machine.gpus)
    if out:
        write_new(out, None)
    answer = sizing(model, machine, _assumed(of, on, model, machine))
    if out:
        lines = (f"{key} = {_toml(value)}" for key, value in answer.scenario.items())
        write_new(out, "\n".join(["# Made by `outlast plan size`.", *lines, ""]))
    if json:
        print_json(answer)
        return EXIT_DONE
    echo(quantity_table(answer.quantities))
    echo("computed from bandwidth alone, a lower bound; `outlast fleet fit` measures real runs")
    remarks(answer)
    if out:
        echo(f"written to {out}; next: outlast plan advise {out}")
    return EXIT_DONE


def _large(flag: str, text: str) -> float:
    """Parse a number above 0, as in 405B or 15.6T. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,20})?)\s*([kKMBGT]?)", text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"{flag} {text} needs a number above 0, as in 405B or 15.6T")
    value = float(match[1]) * _TIMES[match[2]]
    if not _LEAST[flag] <= value <= _MOST:
        unit = f": give a unit, as in {match[1]}B" if not match[2] else ""
        raise ConfigError(f"{flag} {text} is {value:g}, out of range{unit}")
    return value


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
