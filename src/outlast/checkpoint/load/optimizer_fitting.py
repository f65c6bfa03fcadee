"""Fitting of a checkpoint to an optimizer: state by parameter, hyperparameters by group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from outlast.checkpoint.save.shard_plan import dtype_name
from outlast.checkpoint.state_content import full_names, parameter_names
from outlast.checkpoint.state_values import restore_group

if TYPE_CHECKING:
    from outlast.checkpoint.load.state_fitting import StateFitting

_Ready = Callable[[], dict[Any, Any]]


def fit_optimizer(fit: StateFitting, name: str) -> None:
    """Register differences, tensors to read and the final update of an optimizer.

    State that does not exist yet is allocated like its parameter. load_state_dict is never used: it
    would cast moments to the parameters' dtype.
    """
    optimizer = fit.state.optimizers[name]
    parameters = parameter_names(name, fit.state)
    saved = fit.saved.shared["optimizers"][name]
    groups: list[dict[str, Any]] = saved["groups"]["value"]
    if len(groups) != len(parameters):
        fit.reject(name, f"{len(groups)} groups in the checkpoint, {len(parameters)} here")
        return
    _check_groups(fit, name, saved["parameters"], parameters)
    tensors = by_parameter(f"{name}.state.", fit.saved.tensors, {c for g in parameters for c in g})
    ready: list[tuple[torch.Tensor, _Ready]] = []
    unchanged: list[torch.Tensor] = []
    everything = zip(
        optimizer.param_groups, parameters, full_names(name, fit.state), groups, strict=True
    )
    for group, called, fulls, settings in everything:
        for parameter, each, full in zip(group["params"], called, fulls, strict=True):
            prefix = f"{name}.state.{each}"
            if fit.matching.skips(full) or fit.matching.skips(prefix):
                unchanged.append(parameter)
                continue
            if full and full not in fit.saved.tensors:
                fit.report_missing(f"{name}: parameter {each}")
                unchanged.append(parameter)
                continue
            live = optimizer.state.get(parameter, {})
            was = fit.saved.tensors.get(full)
            state = _state(
                fit,
                prefix,
                tensors.get(each, {}),
                parameter,
                live,
                settings,
                was.dtype if was else "",
            )
            if state is not None:
                ready.append((parameter, state))
    hyperparameters = fit.deferred_value(saved["groups"])
    saved_states = fit.deferred_value(saved["state"])

    def put_back() -> None:
        for group, values in zip(optimizer.param_groups, hyperparameters(), strict=True):
            restore_group(group, values)
        states: dict[Any, Any] = {p: optimizer.state[p] for p in unchanged if p in optimizer.state}
        states |= {
            parameter: _ordered(state(), saved.get("keys", ())) for parameter, state in ready
        }
        optimizer.state.clear()
        optimizer.state.update(saved_states() | states)

    fit.add_step(put_back)


def _ordered(state: dict[Any, Any], keys: Iterable[Any]) -> dict[Any, Any]:
    """Return a parameter's state in the order of `keys`, which `torch.save` writes."""
    return {key: state[key] for key in keys if key in state} | state


def _check_groups(
    fit: StateFitting, name: str, saved: list[list[str]], parameters: list[list[str]]
) -> None:
    """Register parameters in other groups, which would silently change hyperparameters."""
    there = {called: number for number, group in enumerate(saved) for called in group}
    for number, group in enumerate(parameters):
        for called in group:
            if there.get(called, number) != number:
                what = f"in group {there[called]} in the checkpoint, in group {number} here"
                fit.reject(f"{name}: parameter {called}", what)


def _state(
    fit: StateFitting,
    prefix: str,
    tensors: Mapping[str, str],
    parameter: torch.Tensor,
    live: Mapping[Any, Any],
    settings: Mapping[str, Any],
    was: str,
) -> _Ready | None:
    """Return one parameter's state, or None where the checkpoint has none.

    `tensors`: names by key; `was`: the parameter's type in the checkpoint.
    """
    skeleton = fit.saved_skeleton(prefix)
    inside = skeleton["holes"] if skeleton else {}
    tensors_by_key: dict[Any, Any] = {}
    for key, full in tensors.items():
        saved = fit.saved_tensor(full)
        if full in inside or saved is None:
            continue
        there = live.get(key)
        if not isinstance(there, torch.Tensor):
            dtype = fit.dtype_of(full, saved)
            if dtype is None:
                continue
            if saved.dtype == was and key != "step" and fit.matching.casts(was, dtype_name(dtype)):
                dtype = parameter.dtype  # moments that had the parameter's type have it again
            there = _make_state(parameter, key, tuple(saved.shape), dtype, settings)
        tensors_by_key[key] = there
        fit.read_into(full, there)
    if not tensors_by_key and skeleton is None:
        return None
    other_values = fit.deferred_value(skeleton, live) if skeleton else dict[Any, Any]
    return lambda: tensors_by_key | other_values()


def by_parameter(
    prefix: str, tensors: Iterable[str], parameters: set[str]
) -> dict[str, dict[str, str]]:
    """Return each parameter's state keys, with the full names of the tensors."""
    names: dict[str, dict[str, str]] = {}
    for full in tensors:
        if full.startswith(prefix):
            called, _, key = full.removeprefix(prefix).rpartition(".")
            while called and called not in parameters:
                called, _, more = called.rpartition(".")
                key = f"{more}.{key}"
            if called:
                names.setdefault(called, {})[key] = full
    return names


def _make_state(
    parameter: Any,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    settings: Mapping[str, Any],
) -> torch.Tensor:
    """Return a tensor as the optimizer would create it at its first step."""
    if key != "step" and shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape:
        # Counters stay on the CPU unless a kernel on the device is to read them.
        reads_it = settings.get("capturable") or settings.get("fused")
        device = parameter.device if reads_it else torch.device("cpu")
        return torch.empty((), dtype=dtype, device=device)
    plain = torch.empty(shape, dtype=dtype, device=parameter.device)
    # DTensors exist only after the import of their module, which takes a second.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed and isinstance(parameter, distributed.DTensor):
        mesh = parameter.device_mesh
        everywhere = [distributed.Replicate()] * mesh.ndim
        return distributed.DTensor.from_local(plain, mesh, everywhere, run_check=False)
    return plain
