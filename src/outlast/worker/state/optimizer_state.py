"""Optimizer state as values that a joiner adopts; descriptions of changed modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outlast.checkpoint.state_content import without_owner
from outlast.checkpoint.state_values import restore_group
from outlast.errors import ProtectError, UnsupportedError
from outlast.worker.state.sharded_modules import as_sharded, sharded_keys
from outlast.worker.state.tensor_digests import are_same, local_shard

GROUPS = (
    "give every group to the optimizer before protect(); parameters that are frozen meanwhile"
    " (requires_grad_(False), after protect()) have no gradients, and it leaves them alone"
)

_NAMED_MAX = 3
Layer = tuple[str, torch.nn.Module, object]  # name, submodule, and the `forward` that it was given


def describe_foreign_optimizers(protected: Mapping[str, Any]) -> str:
    """Return text that names objects with `step` and `zero_grad` that are not torch optimizers."""
    return "".join(
        f"; {name!r} ({type(each).__name__}) is not a torch.optim.Optimizer, and its step cannot"
        " wait for the vote: derive its class from that"
        for name, each in protected.items()
        if callable(getattr(each, "step", None)) and callable(getattr(each, "zero_grad", None))
    )


def group_members(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Return the parameters of each group, in lists of their own."""
    return [list(group["params"]) for group in optimizer.param_groups]


def must_have_groups(
    name: str,
    optimizer: torch.optim.Optimizer,
    before: Sequence[Sequence[torch.Tensor]],
    named_parameters: Callable[[], Iterable[tuple[str, torch.nn.Parameter]]],
) -> None:
    """Raise ProtectError naming the optimizer's groups that differ from `before`.

    `named_parameters` returns the protected ones by name.
    """
    groups = optimizer.param_groups
    if len(groups) == len(before) and all(
        are_same(group["params"], members) for group, members in zip(groups, before, strict=True)
    ):
        return
    names = {id(parameter): known for known, parameter in named_parameters()}
    texts: list[str] = []
    for index, group in enumerate(groups):
        known = {id(p) for p in before[index]} if index < len(before) else set[int]()
        new = [
            names.get(id(p), f"a {type(p).__name__} {tuple(p.shape)} of no protected module")
            for p in group["params"]
            if id(p) not in known
        ]
        count = sum(id(p) in known for p in group["params"])
        if index >= len(before):
            texts.append(f"group {index} was added, with {_listed(new)}")
        elif new:
            texts.append(f"group {index} got {_listed(new)}")
        elif count < len(known):
            texts.append(f"group {index} lost {len(known) - count} of {len(known)} parameters")
    texts += [f"group {index} was removed" for index in range(len(groups), len(before))]
    raise ProtectError(
        f"optimizer {name!r} ({type(optimizer).__name__}) has other groups than at protect()"
        f" ({'; '.join(texts) or 'their order changed'}), which a redo cannot put back and a"
        f" replacement worker does not have: {GROUPS}"
    )


def by_first_name(named: Mapping[str, torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return each parameter once, in the order of the names: a shared one by the first of its."""
    first = {id(parameter): name for name, parameter in sorted(named.items(), reverse=True)}
    return [(name, named[name]) for name in sorted(first.values())]


def describe_parameter_changes(
    before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor], types: Mapping[str, str]
) -> str:
    """Return how a model's parameters (by name) have changed: pruned, tied, added, ...

    `types`: the class of each submodule, by its name.
    """
    present = {name: id(parameter) for name, parameter in now.items()}
    by_id = {id(parameter): name for name, parameter in before.items()}
    texts: list[str] = []
    for name, number in present.items():
        where = f"{name} of {types[name.rpartition('.')[0]]}"
        if name in before and id(before[name]) == number:
            continue
        other = by_id.get(number, "")
        if other and other in present:
            texts.append(f"{where} was tied to {other}")
        elif other:
            texts.append(f"{other} became {where} (pruned or parametrized)")
        elif name in before:
            texts.append(f"{where} was replaced by another parameter")
        else:
            texts.append(f"{where} was added")
    moved = set(present.values())
    texts += [
        f"{name} was removed"
        for name, parameter in before.items()
        if name not in present and id(parameter) not in moved
    ]
    more = f", and {len(texts) - _NAMED_MAX} more" if texts[_NAMED_MAX:] else ""
    return ", ".join(texts[:_NAMED_MAX]) + more or "their order changed"


def layers_of(named: Iterable[tuple[str, nn.Module]]) -> list[Layer]:
    """Return each submodule's name, the submodule, and the `forward` that it was given."""
    return [
        (name, part, _own_forward(part) if "forward" in part.__dict__ else None)
        for name, part in named
    ]


def _own_forward(part: nn.Module) -> object:
    """Return the `forward` that a module was given, None for that of its class."""
    given = vars(part).get("forward")
    is_of_class = getattr(given, "__func__", None) is getattr(type(part), "forward", None)
    return None if is_of_class and getattr(given, "__self__", None) is part else given


def must_keep_layers(before: list[Layer], now: list[Layer]) -> list[Layer]:
    """Return the layers. Raise ProtectError if a submodule was replaced since the first phase, or
    was given another `forward`."""
    if not before or before == now:
        return now
    old = {name: (part, forward) for name, part, forward in before}
    texts: list[str] = []
    for name, part, forward in now:
        kind = type(part).__name__
        if name not in old:
            texts.append(f"{name} ({kind}) was added")
        elif old[name][0] is not part:
            texts.append(f"{name} ({type(old[name][0]).__name__}) was replaced by a {kind}")
        elif old[name][1] != forward:
            texts.append(f"{name} ({kind}) was given another forward")
    texts += [f"{name} was removed" for name in old.keys() - {name for name, _, _ in now}]
    raise ProtectError(
        f"a protected module has other layers than in the first phase ({_listed(texts)}): a"
        " replacement worker would compute with those that the script builds at its top; build"
        " everything before protect(), and choose in forward() by a plain attribute or a buffer;"
        " nothing was applied"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if names[_NAMED_MAX:] else ""
    return f"{', '.join(names[:_NAMED_MAX])}{more}"


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return each group without its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def optimizer_tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state and groups as plain values and tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "groups": hyperparameters(optimizer),
        # Raw tensors: load_state_dict would cast moments to the parameters' dtype.
        "state": [
            _shards(optimizer.state[p]) if p in optimizer.state else None for p in parameters
        ],
        "sharded": [sharded_keys(p, optimizer.state.get(p, {})) for p in parameters],
        "unowned": without_owner(optimizer),
    }


def _shards(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: local_shard(v) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def must_be_whole(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that communicates with other ranks in its step."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UnsupportedError(
            f"optimizer {name!r} is a ZeroRedundancyOptimizer: its step() broadcasts parameters"
            " after it has begun to change them, and each rank alone holds its part of the moments,"
            " so that a rank that is lost could be neither put back nor replaced; nothing was"
            " protected; use FSDP2 (fully_shard) with the inner optimizer, or DDP with it unsharded"
        )


def must_fit(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ProtectError if `saved` is of an optimizer with other groups or parameters."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    there = (len(saved["groups"]), len(saved["state"]))
    here = (len(optimizer.param_groups), count)
    if there != here:
        raise ProtectError(
            f"optimizer {name!r} was saved with {there[0]} groups of {there[1]} parameters in all,"
            f" the script has {here[0]} of {here[1]}; nothing was taken over"
        )


def put_in_groups(
    optimizer: torch.optim.Optimizer, hyperparameters: Iterable[Mapping[str, Any]]
) -> None:
    """Set the groups to `hyperparameters` and delete keys that were added later."""
    for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
        restore_group(group, values)
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]


def optimizer_adopt(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, rates: bool = True
) -> None:
    """Set state to `saved`, and hyperparameters if `rates`. Tensors are copied: later steps do not
    change `saved`."""
    if rates:
        put_in_groups(optimizer, saved["groups"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for parameter, values, sharded in zip(
        parameters, saved["state"], saved["sharded"], strict=True
    ):
        if values is not None:
            optimizer.state[parameter] = {
                k: as_sharded(parameter, k, _on(parameter, v), sharded) for k, v in values.items()
            }
    for key, value in saved.get("unowned", {}).items():
        optimizer.state[key] = _on(parameters[0], value)


def _on(parameter: torch.Tensor, value: Any) -> Any:
    if type(value) is dict:
        return {key: _on(parameter, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(parameter, item) for item in value)
    # 0-dim step counters stay on the CPU, where the optimizer made them unless it is capturable.
    if isinstance(value, torch.Tensor):
        return value.to(parameter.device if value.dim() else value.device, copy=True)
    return copy.deepcopy(value)
