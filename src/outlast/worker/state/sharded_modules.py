"""Sharded modules: undo of FSDP2 iterations, and shards of optimizer states.

A DTensor is a shard in this process's memory and a layout that the script has built. Only the shard
moves between workers; the layout is the joiner's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from outlast.errors import PhaseError, ProtectError, UnsupportedError
from outlast.worker.state.protected_modules import ProtectedModules


def refuse_unsupported(modules: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedError for modules whose shards cannot be located."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: no module is wrapped
    for name, module in modules.items():
        for part in module.modules():
            if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
                raise UnsupportedError(
                    f"module {name!r} is wrapped in FullyShardedDataParallel (FSDP1): its flat"
                    " parameters do not identify the shard of a rank; nothing was protected; use"
                    " fully_shard (FSDP2), on a 2-D mesh where each shard is to have a replica"
                )
        if any(hasattr(parameter, "_st_info") for parameter in module.parameters()):
            raise UnsupportedError(
                f"module {name!r} is a tensor-parallel module inside DistributedDataParallel with a"
                " device_mesh, which makes new parameters in each forward; nothing was protected;"
                " use fully_shard on the data dimensions of the mesh instead of DDP"
            )


# Settings of a group of parameters that scripts switch between and inside phases.
_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "unshard_in_backward",
    "unshard_async_op",
    "gradient_divide_factor",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
)


class FSDPIterations:
    """The iterations of all protected FSDP2 modules."""

    def __init__(self, modules: ProtectedModules) -> None:
        self._modules = modules

    def settle(self) -> None:
        """End an attempt before its vote: reshard, and discard the order of its forwards.

        The order decides which all-gathers a backward prefetches, and a joiner has run fewer
        forwards. Raises PhaseError if gradients were not reduced.
        """
        for root in self._roots():
            for group in _groups_of(root):
                is_partial = group._partial_reduce_output is not None  # noqa: SLF001 - torch has no other access
                is_partial |= getattr(group, "_post_backward_pending", False)  # torch 2.15
                if is_partial or any(_gradient_of(p) is not None for p in group.fsdp_params):
                    raise PhaseError(
                        "the phase leaves gradients of fully_shard that were not reduced"
                        " (set_requires_gradient_sync(False), set_requires_all_reduce(False)): a"
                        " replacement worker would not have them; end the phase with a backward"
                        " that synchronizes"
                    )
            _reset(root)

    def must_be_sharded(self, optimizer: torch.optim.Optimizer) -> None:
        """Check before a step of `optimizer` that none of its parameters is gathered.

        Raises PhaseError. The next forward would use the gathered values of before the step, where
        `settle` gathers them again.
        """
        for root in self._roots():
            for group in _groups_of(root):
                if not group.is_sharded and _steps(optimizer, group):
                    raise PhaseError(
                        "parameters of fully_shard are gathered where the optimizer steps (of"
                        f" {group._module_fqn or 'the root module'}): the next forward of plain"  # noqa: SLF001 - torch has no other access
                        " torch would use their values of before the step; a forward without"
                        " backward and set_reshard_after_backward(False) leave them gathered; call"
                        " reshard() on that module before the step"
                    )

    def settings(self) -> list[Any]:
        """Return what the script may switch of each FSDP2 module, as plain values."""
        parts = self._parts()
        places = {id(part._get_fsdp_state()): place for place, part in enumerate(parts)}  # noqa: SLF001 - no other
        return [_settings_of(part, places) for part in parts]

    def set_settings(self, settings: list[Any]) -> None:
        """Restore the result of `settings`. No-op if there are other FSDP2 modules now."""
        parts, present = self._parts(), self.settings()
        if len(settings) != len(parts):
            return
        for part, saved, now in zip(parts, settings, present, strict=True):
            if saved == now:
                continue
            is_last, is_manual, reshards, before, behind, *values = saved
            part.set_is_last_backward(is_last)
            if is_manual is not None:  # torch has a setter for the root alone
                part._get_fsdp_state()._state_ctx.manual_backward_finalization = is_manual  # noqa: SLF001
            if reshards is not None:
                part.set_reshard_after_forward(reshards, recurse=False)
            part.set_modules_to_forward_prefetch([parts[place] for place in before])
            part.set_modules_to_backward_prefetch([parts[place] for place in behind])
            for (group, name), value in zip(_places_of(part), values, strict=True):
                setattr(group, name, value)

    def undo(self) -> None:
        """End a refused attempt, at any point of its forward or backward."""
        for root in self._roots():
            for group in _groups_of(root):
                group._all_gather_result = None  # noqa: SLF001 - its generation has been severed
            for shard in _parameters_of(root):
                if "unsharded_accumulated_grad" in vars(shard):  # before torch 2.15
                    shard.unsharded_accumulated_grad = None
                if hasattr(shard, "_unsharded_param"):
                    shard._unsharded_param.grad = None  # noqa: SLF001 - torch has no other access
            _reset(root)

    def _parts(self) -> list[Any]:
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return []
        parts = self._modules.parts
        if not _are_sharded(frozenset(map(type, parts)), fsdp.FSDPModule):
            return []
        return [part for part in parts if isinstance(part, fsdp.FSDPModule)]

    def _roots(self) -> list[Any]:
        # None before the first forward, when there is nothing to end.
        return [part for part in self._parts() if part._get_fsdp_state()._is_root]  # noqa: SLF001 - no other


@lru_cache(maxsize=64)
def _are_sharded(kinds: frozenset[type], sharded: type) -> bool:
    return any(issubclass(kind, sharded) for kind in kinds)


def _reset(root: Any) -> None:
    """Reshard and drop the state of an iteration. The gradients of shards stay, which torch 2.15
    would drop as well."""
    shards = [shard.sharded_param for shard in _parameters_of(root)]
    gradients = [shard.grad for shard in shards]
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        reset_by_hand(root._get_fsdp_state())  # noqa: SLF001 - torch has no other access
    for shard, gradient in zip(shards, gradients, strict=True):
        if shard.grad is not gradient:
            shard.grad = gradient


def reset_by_hand(root: Any) -> None:
    """Do for the state of a root what `reset_iter_state` does, which torch before 2.13 lacks."""
    shared, wait = root._comm_ctx, root._device_handle.current_stream().wait_event  # noqa: SLF001 - torch has no other access, here and below
    if hasattr(shared, "reduce_scatter_states"):
        scattered = [*shared.reduce_scatter_states]
        shared.reduce_scatter_states.clear()
    else:  # torch 2.11 has one
        scattered, shared.reduce_scatter_state = [shared.reduce_scatter_state], None
    _wait_for(wait, [shared.all_gather_state, *scattered])
    shared.all_gather_state = None
    shared.post_forward_order.clear()
    common = root._state_ctx  # noqa: SLF001
    for state in common.all_states:
        state._modules_to_run_forward.clear()  # noqa: SLF001
        state._training_state = type(state._training_state).IDLE  # noqa: SLF001
        for group in groups_of_state(state):
            _reset_group(group, wait)
    common.iter_forward_root, common.post_backward_final_callback_queued = None, False


def _reset_group(group: Any, wait: Callable[[Any], object]) -> None:
    gathered = group._all_gather_result  # noqa: SLF001 - torch has no other access, here and below
    if gathered is not None:
        if gathered.all_gather_event is not None:
            wait(gathered.all_gather_event)
        if isinstance(gathered.all_gather_work, torch.distributed.Work):
            gathered.all_gather_work.wait()
    if group._post_reduce_event is not None:  # noqa: SLF001
        wait(group._post_reduce_event)  # noqa: SLF001
    _wait_for(wait, [group._all_reduce_state])  # noqa: SLF001
    group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)  # noqa: SLF001
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None  # noqa: SLF001
    group._reshard_after_forward_event = group._partial_reduce_output = None  # noqa: SLF001
    group._post_forward_indices.clear()  # noqa: SLF001
    group._training_state = type(group._training_state).IDLE  # noqa: SLF001
    group._to_sharded()  # noqa: SLF001


def _wait_for(wait: Callable[[Any], object], states: Iterable[Any]) -> None:
    """Let the current stream wait for the events of communication states, where there are any."""
    for state in states:
        if state is not None and state.event is not None:
            wait(state.event)


def _settings_of(part: Any, places: Mapping[int, int]) -> list[Any]:
    """Return the settings of one module; `places` of all modules by the ids of their states."""
    state: Any = part._get_fsdp_state()  # noqa: SLF001 - torch has no other access, here and below
    prefetched = state._states_to_forward_prefetch, state._states_to_backward_prefetch  # noqa: SLF001
    return [
        state._state_ctx.is_last_backward,  # noqa: SLF001
        getattr(state._state_ctx, "manual_backward_finalization", None),  # noqa: SLF001 - torch 2.15
        _reshards(state),
        *([places[id(each)] for each in states if id(each) in places] for states in prefetched),
        *(getattr(group, name) for group, name in _places_of(part)),
    ]


def _reshards(state: Any) -> bool | None:
    """Return whether the script has chosen to reshard after forward; None: torch has, or the script
    reshards to a smaller mesh."""
    if state._auto_reshard_after_forward:  # noqa: SLF001 - the first forward decides
        return None
    groups = groups_of_state(state)
    meshes = [(each.mesh_info, each.post_forward_mesh_info) for each in groups]
    if any(smaller not in (None, mesh) for mesh, smaller in meshes):
        return None
    return any(mesh is not None for _, mesh in meshes)


def _places_of(part: Any) -> list[tuple[Any, str]]:
    """Return (group, name) of each setting that this release of torch has."""
    groups = groups_of_state(part._get_fsdp_state())  # noqa: SLF001 - torch has no other access
    return [(group, name) for group in groups for name in _SETTINGS if name in vars(group)]


def _groups_of(root: Any) -> Iterator[Any]:
    for state in root._get_fsdp_state()._state_ctx.all_states:  # noqa: SLF001 - torch has no list
        yield from groups_of_state(state)


def groups_of_state(state: Any) -> list[Any]:
    """Return the groups of parameters of one FSDP2 module, by its state. torch 2.11 has one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups  # noqa: SLF001 - torch has no other access, here and below
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: SLF001


def _parameters_of(root: Any) -> Iterator[Any]:
    for group in _groups_of(root):
        yield from group.fsdp_params


def _gradient_of(shard: Any) -> Any:
    whole = getattr(shard, "_unsharded_param", None)
    gradient = None if whole is None else whole.grad
    return gradient if gradient is not None else shard.unsharded_accumulated_grad


def sharded_keys(parameter: torch.Tensor, values: Mapping[str, Any]) -> list[str]:
    """Return the keys of an optimizer's values that are sharded as their parameter is.

    Raises ProtectError for a value that is sharded in another way.
    """
    keys = [key for key, value in values.items() if hasattr(value, "to_local")]
    for key in keys:
        if _layout(values[key]) != _layout(parameter):
            raise ProtectError(
                f"an optimizer keeps {key!r} of a parameter of shape {tuple(parameter.shape)} in"
                " another layout than the parameter's: a replacement worker could not rebuild it;"
                " use an optimizer whose moments are sharded as the parameters are (Adam, SGD)"
            )
    return keys


def as_sharded(parameter: Any, key: str, value: Any, keys: Collection[str]) -> Any:
    """Return the shard `value` as a DTensor in the layout of `parameter` if `key` is in `keys`."""
    if key not in keys:
        return value
    from torch.distributed.tensor import DTensor  # imported already: the parameter is one

    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _layout(tensor: Any) -> tuple[Any, ...]:
    if not hasattr(tensor, "to_local"):
        return ()
    return tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape)


def _steps(optimizer: torch.optim.Optimizer, group: Any) -> bool:
    """Return whether an optimizer may change parameters of an FSDP2 group."""
    stepped = {id(p) for each in optimizer.param_groups for p in each["params"]}
    parameters = (each.sharded_param for each in group.fsdp_params)
    return any(p.requires_grad and id(p) in stepped for p in parameters)
