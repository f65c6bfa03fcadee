"""Translation of a checkpoint's names to those of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from outlast.checkpoint.load.optimizer_fitting import by_parameter
from outlast.checkpoint.load.state_fitting import SavedState
from outlast.checkpoint.state.script_state import ScriptState
from outlast.checkpoint.state.state_content import (
    Skeleton,
    full_names,
    is_within,
    matched_name,
    parameter_names,
    parameter_owners,
)
from outlast.errors import UsageError


class RenamedCheckpoint(NamedTuple):
    """A checkpoint under the state's names. `origin`: the original names of tensors, by these."""

    saved: SavedState
    origin: Mapping[str, str]


def rename_checkpoint(
    saved: SavedState, rename: Mapping[str, str], state: ScriptState
) -> RenamedCheckpoint:
    """Rename tensors and entries, and the optimizer state of renamed parameters.

    Raises UsageError for names that the checkpoint lacks, two that become one, and an optimizer
    whose parameters are ambiguous.
    """
    names = [*saved.shared["kinds"], *saved.tensors, *saved.rest]
    if not rename:
        return RenamedCheckpoint(saved, {name: name for name in saved.tensors})
    unknown = [old for old in rename if not any(is_within(name, old) for name in names)]
    if unknown:
        raise UsageError(
            f"rename: the checkpoint has no {', '.join(unknown)}; nothing was touched;"
            " `outlast ckpt show` lists its names"
        )
    new = {name: _new(name, rename) for name in names}
    for name in saved.shared.get("optimizers", {}):
        new |= _of_optimizer(saved, name, rename, state)
    for names in (saved.shared["kinds"], saved.tensors, saved.rest):
        _refuse_two_of_a_name(names, new)

    def skeleton(each: Skeleton) -> Skeleton:
        return {**each, "holes": {new[name]: hole for name, hole in each["holes"].items()}}

    def optimizer(name: str, each: Mapping[str, Any]) -> dict[str, Any]:
        calls = {called: new.get(f"{name} calls {called}", called)
                 for group in each["parameters"] for called in group}  # fmt: skip
        parameters = [[calls[called] for called in group] for group in each["parameters"]]
        groups, others = skeleton(each["groups"]), skeleton(each["state"])
        return {"groups": groups, "parameters": parameters, "state": others}

    shared = saved.shared
    return RenamedCheckpoint(
        SavedState(
            {new[name]: tensor for name, tensor in saved.tensors.items()},
            {
                "kinds": {new[name]: kind for name, kind in shared["kinds"].items()},
                "classes": {new[name]: kind for name, kind in shared["classes"].items()},
                "optimizers": {
                    new[name]: optimizer(name, each)
                    for name, each in shared.get("optimizers", {}).items()
                },
                "objects": {
                    new[n]: skeleton(each) for n, each in shared.get("objects", {}).items()
                },
                "values": {new[n]: skeleton(each) for n, each in shared.get("values", {}).items()},
            },
            {new[name]: skeleton(each) for name, each in saved.rest.items()},
        ),
        {new[name]: name for name in saved.tensors},
    )


def _new(name: str, rename: Mapping[str, str]) -> str:
    """Return the new name, by the longest old name that contains it."""
    prefix = max((old for old in rename if is_within(name, old)), key=len, default=None)
    return name if prefix is None else rename[prefix] + name[len(prefix) :]


def _of_optimizer(
    saved: SavedState, optimizer: str, rename: Mapping[str, str], state: ScriptState
) -> dict[str, str]:
    """Return new names of the state of renamed parameters, and of the parameters themselves."""
    calls = matched_name(saved.shared, optimizer, saved.tensors)
    known = parameter_owners(saved.shared, optimizer, saved.tensors)
    if not known:
        modules = [n for n, kind in saved.shared["kinds"].items() if kind == "module"]
        candidates = {f"{module}.{called}" for module in modules for called in calls}
        if any(_new(name, rename) != name for name in candidates & saved.tensors.keys()):
            raise UsageError(
                f"rename: several modules have parameters of the names that optimizer {optimizer!r}"
                " has; nothing was touched; load it without renaming, or skip it"
            )
    there = _new(optimizer, rename)
    here: dict[str, str] = {}
    if there in state.optimizers:
        names = zip(full_names(there, state), parameter_names(there, state), strict=True)
        for fulls, short in names:
            here |= dict(zip(fulls, short, strict=True))
    state_names = by_parameter(f"{optimizer}.state.", [*saved.tensors, *saved.rest], {*calls})
    new_names: dict[str, str] = {}
    for each in calls:
        full = _new(known.get(each, each), rename)
        new = here.get(full, each)
        new_names[f"{optimizer} calls {each}"] = new
        old_prefix, prefix = f"{optimizer}.state.{each}", f"{there}.state.{new}"
        new_names[old_prefix] = prefix
        for name in state_names.get(each, {}).values():
            new_names[name] = prefix + name.removeprefix(old_prefix)
    return new_names


def _refuse_two_of_a_name(names: Mapping[str, Any], new: Mapping[str, str]) -> None:
    sources: dict[str, str] = {}
    for name in names:
        if sources.setdefault(new[name], name) != name:
            raise UsageError(
                f"rename: {sources[new[name]]} and {name} would both be {new[name]}; nothing was"
                " touched"
            )
