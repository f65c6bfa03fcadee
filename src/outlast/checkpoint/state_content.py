"""A script's state as named tensors and one value, a rank's own state, name matching of loads.

Names do not depend on wrappers of a model: `<entry>.<name in the module>` for modules,
`<entry>.state.<name of the parameter>.<key>` for optimizers. All other values form the `shared`
value (docs/format.md): `kinds`, `classes`, `optimizers`, `objects`, `values`, and `rest`, the
values of modules and optimizers besides plain tensors.

State of one rank alone (random generators, loader positions, small buffers) is encoded as one
value, `{"random", "objects", "buffers", "rest"}`.

A name in options stands for itself and for all below it: `model.head` for `model.head.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import xxhash
from torch.optim import Optimizer

from outlast import random_state
from outlast.checkpoint import script_state, state_values
from outlast.checkpoint.format import codec
from outlast.checkpoint.save.shard_plan import WHOLE_BYTES
from outlast.checkpoint.script_state import ScriptState
from outlast.checkpoint.state_values import add_tensors, split_tensors
from outlast.errors import CodecError

Skeleton = dict[str, Any]


class StateContent(NamedTuple):
    """A script's state in the form that is saved.

    `tensors`: live, by reference. `shared`: an encoded value. `rest`: its part that may differ
    between ranks with different parts of a model (pipeline stages). `digests`: of the values that
    must be equal on all ranks that have them, by entry.
    """

    tensors: dict[str, torch.Tensor]
    shared: bytes
    rest: dict[str, Skeleton]
    digests: dict[str, bytes]


def flatten_state(state: ScriptState) -> StateContent:
    """Return the content of `state`, without copying or reading tensors.

    Raises CodecError naming the place of a value that cannot be written, or a duplicate name.
    """
    _refuse_hidden_state(state.optimizers)
    tensors: dict[str, torch.Tensor] = {}
    rest: dict[str, Skeleton] = {}
    for name, found in state.entries.items():
        for entry in found:
            full = f"{name}.{entry.name}"
            if entry.kind == "made":
                rest[full] = split_tensors(entry.value, full, tensors)
            else:
                add_tensors(tensors, full, entry.value)
    shared = {
        "kinds": state.kinds,
        "classes": {n: class_of(part) for n, part in (state.optimizers | state.objects).items()},
        "optimizers": {
            name: _optimizer(name, optimizer, parameter_names(name, state), tensors, rest)
            for name, optimizer in state.optimizers.items()
        },
        "objects": {n: split_tensors(o.state_dict(), n, tensors) for n, o in state.objects.items()},
        "values": {
            name: split_tensors(value, name, tensors) for name, value in state.values.items()
        },
        "rest": rest,
    }
    return StateContent(tensors, codec.encode(shared), rest, _digests(shared))


def _digests(shared: dict[str, Any]) -> dict[str, bytes]:
    """Return 8 bytes an entry, without names of parameters: pipeline stages have others."""
    optimizers = {
        name: {key: value for key, value in part.items() if key not in ("parameters", "keys")}
        for name, part in shared["optimizers"].items()
    }
    skeletons = optimizers | shared["objects"] | shared["values"]
    return {
        name: xxhash.xxh3_64_digest(codec.encode([shared["kinds"][name], skeleton]))
        for name, skeleton in skeletons.items()
    }


def class_of(part: Any) -> str:
    """Return the class of an optimizer or a scheduler of torch's own; "" for any other."""
    kind = type(part)
    return kind.__qualname__ if kind.__module__.startswith("torch.optim.") else ""


def parameter_names(name: str, state: ScriptState) -> list[list[str]]:
    """Return the names of the parameters of optimizer `name`, by group.

    As in their module; where several modules own parameters, with the module's entry before it;
    `<group>.<index>` for those that no module owns.
    """
    optimizer = state.optimizers[name]
    known = script_state.parameter_entries(state.entries)
    used = [id(p) for group in optimizer.param_groups for p in group["params"]]
    several = len({known[key][0] for key in used if key in known}) > 1

    def called(parameter: torch.Tensor, group: int, index: int) -> str:
        if id(parameter) not in known:
            return f"{group}.{index}"
        module, inside = known[id(parameter)]
        return f"{module}.{inside}" if several else inside

    return [
        [called(parameter, number, index) for index, parameter in enumerate(group["params"])]
        for number, group in enumerate(optimizer.param_groups)
    ]


def full_names(name: str, state: ScriptState) -> list[list[str]]:
    """Return the tensor names of the parameters of optimizer `name`, by group.

    "" for those that no module owns.
    """
    known = script_state.parameter_entries(state.entries)
    return [
        [".".join(known.get(id(parameter), ())) for parameter in group["params"]]
        for group in state.optimizers[name].param_groups
    ]


def _optimizer(
    name: str,
    optimizer: Optimizer,
    parameters: list[list[str]],
    tensors: dict[str, torch.Tensor],
    rest: dict[str, Skeleton],
) -> dict[str, Any]:
    """Return the parts of an optimizer that belong to no parameter; add its tensors.

    Raw tensors are saved instead of its state_dict: load_state_dict would cast moments to the
    parameters' dtype.
    """
    keys: dict[Any, None] = {}  # in the order in which the optimizer has made them
    for group, group_names in zip(optimizer.param_groups, parameters, strict=True):
        for parameter, called in zip(group["params"], group_names, strict=True):
            kept = optimizer.state.get(parameter)
            if kept is None:
                continue
            keys |= dict.fromkeys(kept)
            prefix, others = f"{name}.state.{called}", dict[Any, Any]()
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and isinstance(key, str):
                    add_tensors(tensors, f"{prefix}.{key}", value)
                else:
                    others[key] = value
            if others:
                rest[prefix] = split_tensors(others, prefix, tensors)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return {
        "groups": split_tensors(groups, f"{name}.param_groups", tensors),
        "parameters": parameters,
        "keys": list(keys),
        "state": split_tensors(without_owner(optimizer), f"{name}.state", tensors),
    }


def _refuse_hidden_state(optimizers: Mapping[str, Optimizer]) -> None:
    """Raise CodecError for an optimizer that keeps its moments in an inner one.

    Only where the inner one is not given (ZeroRedundancyOptimizer: each rank's own part).
    """
    given = {id(optimizer) for optimizer in optimizers.values()}
    for name, optimizer in optimizers.items():
        for attribute, inner in vars(optimizer).items():
            if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
                continue
            if id(inner) not in given:
                raise CodecError(
                    f"{name} is a {type(optimizer).__qualname__}, which keeps the state of its"
                    f" parameters in .{attribute}, which would not be saved; nothing was"
                    f" saved; give .{attribute} a name of its own beside it, or use the optimizer"
                    " itself (with fully_shard, which divides its state among ranks)"
                )


def without_owner(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the entries of an optimizer's state that belong to no parameter."""
    return {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class NameMatching(NamedTuple):
    """Options of a load.

    `strict`: names that only one side has are differences; else they are left out and listed.
    `cast`: floating-point types may differ. `skip`: names that stay unchanged. `rename`: names of
    the checkpoint, and their names in the state.
    """

    strict: bool = True
    cast: bool = False
    skip: tuple[str, ...] = ()
    rename: Mapping[str, str] = {}

    def skips(self, name: str) -> bool:
        """Return whether `name` stays unchanged."""
        return any(is_within(name, each) for each in self.skip)

    def casts(self, there: str, here: str) -> bool:
        """Return whether values of one type may be read into a tensor of the other."""
        return self.cast and there in _FLOATS and here in _FLOATS


EXACT = NameMatching()


def is_within(name: str, subtree: str) -> bool:
    """Return whether `name` is `subtree`, or lies below it."""
    return name == subtree or name.startswith(f"{subtree}.")


def matched_name(shared: Mapping[str, Any], optimizer: str, tensors: Collection[str]) -> list[str]:
    """Return the parameters of a checkpoint's `optimizer`: rank 0's, and any with a state."""
    names = [each for group in shared["optimizers"][optimizer]["parameters"] for each in group]
    prefixes, state = _prefixes(shared), f"{optimizer}.state."
    for name in tensors:
        each = name.removeprefix(state).rpartition(".")[0] if name.startswith(state) else ""
        while each and not any(f"{prefix}{each}" in tensors for prefix in prefixes):
            each = each.rpartition(".")[0]
        names += [each] if each else []
    return list(dict.fromkeys(names))


def parameter_owners(
    shared: Mapping[str, Any], optimizer: str, tensors: Collection[str]
) -> dict[str, str]:
    """Return the tensor names of the parameters of a checkpoint's `optimizer`.

    By the optimizer's own names; empty where the match is ambiguous.
    """
    names = matched_name(shared, optimizer, tensors)
    fitting = [
        prefix
        for prefix in _prefixes(shared)
        if all(f"{prefix}{each}" in tensors for each in names)
    ]
    return {each: f"{fitting[0]}{each}" for each in names} if len(fitting) == 1 else {}


def _prefixes(shared: Mapping[str, Any]) -> list[str]:
    return ["", *(f"{name}." for name, kind in shared["kinds"].items() if kind == "module")]


def capture_rank_state(state: ScriptState, rest: Mapping[str, Any], world: int) -> bytes:
    """Return this rank's own part of a checkpoint.

    It includes small buffers although they are tensors of the model: BatchNorm's differ by rank,
    and the tensors of a checkpoint have only one rank's of each. Raises CodecError as
    `codec.encode` does.
    """
    return codec.encode(
        {
            "random": random_state.of_process() | {"named": random_state.states(state.generators)},
            "objects": {
                name: part if isinstance(part, (dict, list)) else part.state_dict()
                for name, part in state.own.items()
            },
            "buffers": rank_buffers(state) if world > 1 else {},
            "rest": rest if world > 1 else {},
        }
    )


def rank_state_differences(
    state: ScriptState, saved: Mapping[str, Any], matching: NameMatching = EXACT
) -> tuple[list[str], list[str]]:
    """Return the names of own parts that the checkpoint lacks, and those that the state lacks."""
    missing: list[str] = []
    unexpected: list[str] = []
    for what, here, there in (
        ("generator", state.generators, saved["random"]["named"]),
        ("own state", state.own, saved["objects"]),
    ):
        for name in sorted({*here, *there}):
            if matching.skips(name) or (name in here and name in there):
                continue
            (missing if name in here else unexpected).append(f"{what} {name!r}")
    return missing, unexpected


@torch.no_grad()
def restore_rank_state(
    state: ScriptState, saved: Mapping[str, Any], *, process: bool, matching: NameMatching = EXACT
) -> None:
    """Restore a decoded own part in the script's objects; with `process`, generators too.

    The process's generators come last: an object may draw while it loads its state.
    """
    from outlast.checkpoint.load.tensor_fill import fill_once  # a worker's start does without it

    live = rank_buffers(state)
    for name, value in saved["buffers"].items():
        if name in live and live[name].shape == value.shape and not matching.skips(name):
            into, values = fill_once(name, live[name], value)
            into.copy_(values)
    for name, part in state.own.items():
        if name in saved["objects"] and not matching.skips(name):
            value = saved["objects"][name]
            if isinstance(part, (dict, list)):
                trained = state_values.restore_parameters(part, value)
                state_values.restore_in_place(part, trained)
            else:
                part.load_state_dict(state_values.restore_parameters(part.state_dict(), value))
    named = saved["random"]["named"]
    random_state.restore_state(
        state.generators, {n: v for n, v in named.items() if not matching.skips(n)}
    )
    if process:
        random_state.restore(saved["random"])


def rank_buffers(state: ScriptState) -> dict[str, torch.Tensor]:
    """Return small buffers by their tensor names: each rank keeps its own."""
    return {
        f"{module}.{entry.name}": entry.value
        for module, found in state.entries.items()
        for entry in found
        if entry.kind == "buffer"
        and type(entry.value) is torch.Tensor
        and entry.value.nbytes < WHOLE_BYTES
    }
