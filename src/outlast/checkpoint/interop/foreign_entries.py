"""Entries of a script's state in the layouts of DCP and of Checkpointer.

Objects of a save by torch.distributed.checkpoint are stored as tensors of bytes, as DCP's planner
made them, and are never unpickled. The shared value has the paths of names in the saved dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outlast.checkpoint.format import codec
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader

IMPORTED = "imported"  # in the shared value: objects that are part of no entry, by name


def values_of(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are no tensors, nested as a script would pass them to DCP.

    Values with tensors inside are left out, but for optimizers. Hyperparameters come in both
    layouts that torch has for names instead of numbers: by group, and
    (`flatten_optimizer_state_dict`) by parameter.
    """
    values: dict[str, Any] = dict(shared.get(IMPORTED, {}))
    for skeletons in (shared["objects"], shared["values"]):
        values |= {name: entry["value"] for name, entry in skeletons.items() if not entry["holes"]}
    for name, optimizer in shared["optimizers"].items():
        tensors = [path for path, _ in optimizer["groups"]["holes"].values()]
        groups = [
            {key: value for key, value in group.items() if (number, key) not in tensors}
            for number, group in enumerate(optimizer["groups"]["value"])
        ]
        by_group = [
            {**group, "params": parameters}
            for group, parameters in zip(groups, optimizer["parameters"], strict=True)
        ]
        values[name] = {"param_groups": by_group} | {
            f"param_groups.{parameter}.{key}": value
            for group, parameters in zip(groups, optimizer["parameters"], strict=True)
            for parameter in parameters
            for key, value in group.items()
        }
    return values


def path_of(name: str, kinds: Mapping[str, str]) -> tuple[str | int, ...]:
    """Return the path of a tensor in the nested dict that a script would pass to DCP."""
    entry = next((entry for entry in kinds if name.startswith(f"{entry}.")), "")
    inside = name.removeprefix(f"{entry}.")
    if kinds.get(entry) == "optimizer" and inside.startswith("state."):
        parameter, _, key = inside.removeprefix("state.").rpartition(".")
        return (entry, "state", parameter, key) if parameter else (name,)
    return (entry, inside) if entry else (name,)


def shared_of(tensors: Iterable[str], objects: Mapping[str, Any]) -> bytes:
    """Return a shared value for `Checkpointer.load`.

    Modules are the first parts of their tensors' names; optimizers are those whose hyperparameters
    name parameters. Where hyperparameters come by parameter, equal ones form a group.
    """
    unassigned = dict(objects)
    names = list(tensors)
    kinds = {entry: "module" if dot else "value" for entry, dot, _ in map(_split_name, names)}
    stateful = {
        entry for entry, _, inside in map(_split_name, names) if inside.startswith("state.")
    }
    decoded = {entry: _optimizer(entry, unassigned) for entry in kinds if entry in stateful}
    optimizers = {entry: optimizer for entry, optimizer in decoded.items() if optimizer}
    values = {
        entry: {"value": None, "holes": {entry: ((), "cpu")}}
        for entry, kind in kinds.items()
        if kind == "value"
    }
    return codec.encode(
        {
            "kinds": kinds | dict.fromkeys(optimizers, "optimizer"),
            "classes": {},
            "optimizers": optimizers,
            "objects": {},
            "values": values,
            "rest": {},
            IMPORTED: unassigned,
        }
    )


def empty_rank_state() -> bytes:
    """Return a rank's own part that leaves generators unchanged."""
    return codec.encode({"random": {"named": {}}, "objects": {}, "buffers": {}, "rest": {}})


def _split_name(name: str) -> tuple[str, str, str]:
    return name.partition(".")


def _optimizer(entry: str, objects: dict[str, Any]) -> dict[str, Any] | None:
    """Return the groups of an optimizer; remove its hyperparameters from `objects`.

    None where there are neither parameter names nor groups of names.
    """
    prefix = f"{entry}.param_groups."
    owners: dict[str, dict[str, Any]] = {}  # groups by number, and parameters
    for name, value in objects.items():
        if name.startswith(prefix):
            owner, _, key = name.removeprefix(prefix).rpartition(".")
            owners.setdefault(owner, {})[key] = value
    numbered = [owners.pop(number) for number in sorted(filter(str.isdecimal, owners), key=int)]
    named = all(_are_names(group.get("params")) for group in numbered)
    if numbered and named:
        parameters = [group.pop("params") for group in numbered]
        groups = numbered
    else:
        alike: dict[bytes, list[str]] = {}
        for parameter, group in owners.items():
            alike.setdefault(codec.encode(group), []).append(parameter)
        parameters = list(alike.values())
        groups = [owners[names[0]] for names in parameters]
    if not groups:
        return None
    for name in [name for name in objects if name.startswith(prefix)]:
        del objects[name]
    return {
        "groups": {"value": groups, "holes": {}},
        "parameters": parameters,
        "state": {"value": {}, "holes": {}},
    }


def _are_names(parameters: Any) -> bool:
    return isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)


SHARED = "shared"
_PATHS = "dcp.paths"

Paths = Mapping[str, tuple[str | int, ...]]


def encode_paths(paths: Paths) -> bytes:
    """Return the shared value of a checkpoint that DCP saved."""
    return codec.encode({_PATHS: dict(paths)})


def shared_in(reader: CheckpointReader) -> dict[str, Any]:
    """Return the decoded shared value of a checkpoint; {} where it has none.

    Raises CorruptionError or StorageError as reading does.
    """
    if not any(blob.name == SHARED for blob in reader.checkpoint.manifests[0].blobs):
        return {}
    shared = codec.decode(reader.blob(0, SHARED))
    return shared if isinstance(shared, dict) else {}


def paths_of(reader: CheckpointReader) -> Paths:
    """Return the path of each name in the saved nested dict, or in that of a script."""
    shared = shared_in(reader)
    if _PATHS in shared:
        return shared[_PATHS]
    kinds = shared.get("kinds", {})
    return {name: path_of(name, kinds) for name in reader.checkpoint.tensors}
