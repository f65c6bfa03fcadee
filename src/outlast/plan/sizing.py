"""A scenario from the model and the machine: state, work, and what saves and restores take."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from outlast.errors import UsageError
from outlast.plan.answers import Quantity
from outlast.plan.words import many
from outlast.theory.scale import FLOPS_PER_PARAMETER_TOKEN, TOKENS_PER_PARAMETER

Precision = Literal["bf16", "fp32", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# What is saved of a parameter: the weight, a copy in 32 bits, and Adam's two moments.
BYTES_PER_PARAMETER: dict[Precision, int] = {"bf16": 14, "fp32": 12, "fp8": 13}
Device = Literal["a100", "h100", "h200", "b200", "mi300x"]
# Dense FLOP/s of matrix products in bf16, by the vendors' data sheets; fp8 doubles them.
PEAK_FLOPS: dict[Device, float] = {
    "a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12, "mi300x": 1307e12,
}  # fmt: skip
NO_FP8: tuple[Device, ...] = ("a100",)
FP32_SHARE = 0.5  # of bf16's rate, as TF32


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`host_bytes_per_s`: from a GPU to its host; `network_bytes_per_s`: of a GPU between hosts;
    `storage_bytes_per_s`: of the whole file system, read or written. `startup_s`: of the job
    without its state."""

    gpus: int
    flops: float
    mfu: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    storage_bytes_per_s: float
    startup_s: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`active`: parameters that a token passes through, fewer than all of them in a mixture of
    experts. `batch_tokens`: of a step. `replica_gpus`: that hold the model once."""

    parameters: float
    active: float
    tokens: float
    precision: Precision
    batch_tokens: float
    replica_gpus: int


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """`scenario`: fields of `outlast plan`, as it takes them."""

    quantities: list[Quantity]
    scenario: dict[str, str | int]


def peak_flops(device: Device, precision: Precision) -> float:
    """Return a GPU's dense FLOP/s in this precision. Raises UsageError where it has none."""
    if precision == "fp8" and device in NO_FP8:
        raise UsageError(f"--precision fp8: {device} has no such arithmetic")
    return PEAK_FLOPS[device] * {"bf16": 1.0, "fp32": FP32_SHARE, "fp8": 2.0}[precision]


def tokens_of(parameters: float) -> float:
    """Return the tokens that a model of this size is trained best on (Hoffmann et al. 2022)."""
    return TOKENS_PER_PARAMETER * parameters


def sizing(model: Model, machine: Machine) -> Sizing:
    """Return state, work, step, and the times of saves and restores, each by its bandwidth alone.

    Work is 6 x active parameters x tokens FLOP at MFU of the peak. A save is spread over all GPUs;
    a restart reads the state once a replica, from storage. Raises UsageError.
    """
    if machine.gpus % model.replica_gpus:
        raise UsageError(f"--replica-gpus {model.replica_gpus} must divide {machine.gpus:,} gpus")
    each = BYTES_PER_PARAMETER[model.precision]
    state_bytes = each * model.parameters
    replicas = machine.gpus // model.replica_gpus
    flops = FLOPS_PER_PARAMETER_TOKEN * model.active
    rate = machine.gpus * machine.flops * machine.mfu
    part_bytes = state_bytes / machine.gpus
    times_s = {
        "work": (flops * model.tokens / rate, "6 x active parameters x tokens / (GPUs x peak x"
                 " MFU)"),
        "step": (flops * model.batch_tokens / rate, "the same for the tokens of a batch"),
        "cost": (part_bytes / machine.host_bytes_per_s, "a GPU's part to its host"),
        "flush": (state_bytes / machine.storage_bytes_per_s, "the state to storage, once"),
        "memory-cost": (part_bytes / machine.host_bytes_per_s, "as for cost"),
        "window": (state_bytes / model.replica_gpus / machine.network_bytes_per_s,
                   "a GPU's part to another host, again"),
        "restore": (machine.startup_s + state_bytes / model.replica_gpus
                    / machine.network_bytes_per_s, "start, and a part over the network"),
        "restart": (machine.startup_s + replicas * state_bytes / machine.storage_bytes_per_s,
                    f"start, and the state read for {many(replicas, 'replica')}"),
    }  # fmt: skip
    found = [
        Quantity(name="state", value=state_bytes, unit="bytes", how="given",
                 source=f"{each} bytes a parameter"),
        *(Quantity(name=key, value=value, unit="s", how="given", source=source)
          for key, (value, source) in times_s.items()),
    ]  # fmt: skip
    if not all(math.isfinite(one.value) for one in found):
        raise UsageError("what follows is not finite: say larger bandwidths")
    scenario: dict[str, str | int] = {
        "gpus": machine.gpus, "replica-gpus": model.replica_gpus, "state": f"{state_bytes:.0f}B",
        **{key: f"{value:.6f}s" for key, (value, _) in times_s.items()},
    }  # fmt: skip
    return Sizing(quantities=found, scenario=scenario)
