"""Scenario of a model on a machine: state, work, times of saves and restores."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from outlast.errors import UsageError
from outlast.plan.model.answer_values import Assumed, Quantity, format_count, format_quantity
from outlast.plan.model.scenario import scenario_of
from outlast.theory.replicas import FLOPS_PER_PARAMETER_TOKEN, TOKENS_PER_PARAMETER

Precision = Literal["bf16", "fp32", "fp8"]
# What is saved of a parameter: the weight, a copy in 32 bits, and Adam's two moments.
BYTES_PER_PARAMETER: dict[Precision, int] = {"bf16": 14, "fp32": 12, "fp8": 13}
Device = Literal["a100", "h100", "h200", "b200", "mi300x"]
# Dense FLOP/s of matrix products in bf16, by the vendors' data sheets; fp8 doubles them.
PEAK_FLOPS: dict[Device, float] = {
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "mi300x": 1307e12,
}
MEMORY_BYTES: dict[Device, float] = {
    "a100": 80e9,
    "h100": 80e9,
    "h200": 141e9,
    "b200": 192e9,
    "mi300x": 192e9,
}
NO_FP8: tuple[Device, ...] = ("a100",)
FP32_SHARE = 0.5  # of bf16's rate, as TF32


class MachineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs, links and storage.

    `flops`: peak of a GPU, `memory_bytes` its memory. `host_bytes_per_s`: from a GPU to its host;
    `network_bytes_per_s`: of a GPU between hosts; `storage_bytes_per_s`: of the whole file system,
    read or written. `startup_s`: of the job without its state.
    """

    gpus: int
    gpus_per_node: int
    flops: float
    memory_bytes: float
    mfu: float
    host_bytes_per_s: float
    network_bytes_per_s: float
    storage_bytes_per_s: float
    startup_s: float


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Model and training.

    `active`: parameters that a token passes through, fewer than all in a mixture of experts.
    `each_bytes`: saved bytes per parameter. `batch_tokens`: per step. `replica_gpus`: GPUs that
    hold the model and its optimizer once.
    """

    parameters: float
    active: float
    tokens: float
    each_bytes: float
    batch_tokens: float
    replica_gpus: int


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `outlast plan` derived from a model and a machine.

    `scenario`: fields as `outlast plan` reads them. `assumed`: flags that were not given.
    """

    quantities: list[Quantity]
    scenario: dict[str, str | int]
    assumed: list[Assumed]
    warnings: list[str]


def peak_flops(device: Device, precision: Precision) -> float:
    """Return a GPU's dense FLOP/s in this precision. Raises UsageError where it has none."""
    if precision == "fp8" and device in NO_FP8:
        raise UsageError(f"--precision fp8: {device} does not support it")
    return PEAK_FLOPS[device] * {"bf16": 1.0, "fp32": FP32_SHARE, "fp8": 2.0}[precision]


def tokens_of(parameters: float) -> float:
    """Return the compute-optimal number of tokens for a model (Hoffmann et al. 2022)."""
    return TOKENS_PER_PARAMETER * parameters


def sizing(model: ModelSpec, machine: MachineSpec, assumed: list[Assumed]) -> Sizing:
    """Return state, work, step, and the times of saves and restores, each by its bandwidth alone.

    Work is 6 x active parameters x tokens FLOP at MFU of the peak. A save is spread over all GPUs;
    a restart reads the state once a replica, from storage. Raises UsageError, and ConfigError where
    no scenario comes of it.
    """
    _refuse_contradictions(model, machine)
    state_bytes = model.each_bytes * model.parameters
    replicas = machine.gpus // model.replica_gpus
    flops = FLOPS_PER_PARAMETER_TOKEN * model.active
    rate = machine.gpus * machine.flops * machine.mfu
    part_bytes = state_bytes / machine.gpus
    held_bytes = state_bytes / model.replica_gpus
    stored = min(machine.storage_bytes_per_s, machine.gpus * machine.network_bytes_per_s)
    by = "" if stored == machine.storage_bytes_per_s else ", limited by all GPUs' network"
    times_s = {
        "work": (
            flops * model.tokens / rate,
            f"6 x {format_quantity(model.active, '')} parameters x"
            f" {format_quantity(model.tokens, '')} tokens"
            f" over {machine.gpus:,} GPUs at {format_quantity(machine.mfu, 'share')} of"
            f" {machine.flops / 1e12:,.0f} TFLOP/s; no attention",
        ),
        "step": (
            flops * model.batch_tokens / rate,
            f"the same for {format_quantity(model.batch_tokens, '')} tokens of a batch",
        ),
        "cost": (part_bytes / machine.host_bytes_per_s, "a GPU's part to its host"),
        "flush": (state_bytes / stored, f"the state to storage, once{by}"),
        "memory-cost": (part_bytes / machine.host_bytes_per_s, "as for cost"),
        "window": (held_bytes / machine.network_bytes_per_s, "a GPU's part to another host, again"),
        "restore": (
            machine.startup_s + held_bytes / machine.network_bytes_per_s,
            "start, and a part over the network",
        ),
        "restart": (
            machine.startup_s + replicas * state_bytes / stored,
            f"start, and the state read for {format_count(replicas, 'replica')}{by}",
        ),
    }
    per_parameter = f"{model.each_bytes:g} bytes a parameter"
    quantities = [
        Quantity(name="state", value=state_bytes, unit="bytes", how="given", source=per_parameter)
    ]
    for key, (value, source) in times_s.items():
        quantities.append(Quantity(name=key, value=value, unit="s", how="given", source=source))
    if not all(math.isfinite(quantity.value) for quantity in quantities):
        raise UsageError("the results are not finite: give larger bandwidths")
    scenario: dict[str, str | int] = {
        "gpus": machine.gpus,
        "gpus-per-node": machine.gpus_per_node,
        "replica-gpus": model.replica_gpus,
        "state": f"{state_bytes:.0f}B",
        **{key: f"{value:.9f}s" for key, (value, _) in times_s.items()},
    }
    scenario_of({key: str(value) for key, value in scenario.items()})
    warnings: list[str] = []
    if held_bytes > machine.memory_bytes:
        warnings.append(
            f"a GPU's part of the state is {format_quantity(held_bytes, 'bytes')}, and its memory"
            f" {format_quantity(machine.memory_bytes, 'bytes')}: it does not fit without offloading"
        )
    return Sizing(quantities=quantities, scenario=scenario, assumed=assumed, warnings=warnings)


def _refuse_contradictions(model: ModelSpec, machine: MachineSpec) -> None:
    """Raise UsageError for contradictory flags."""
    if machine.gpus % model.replica_gpus:
        raise UsageError(f"--replica-gpus {model.replica_gpus} must divide {machine.gpus:,} gpus")
    if model.active > model.parameters:
        raise UsageError(
            f"--active {format_quantity(model.active, '')} is more than all"
            f" {format_quantity(model.parameters, '')} --parameters"
        )
    if model.batch_tokens > model.tokens:
        raise UsageError(
            f"--batch-tokens {format_quantity(model.batch_tokens, '')} is more than all"
            f" {format_quantity(model.tokens, '')} --tokens"
        )
