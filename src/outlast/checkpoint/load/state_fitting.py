"""Fitting of a checkpoint to a live state: differences, targets, values to restore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn

from outlast.checkpoint import state_values
from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.format.value_encoder import TensorSpec
from outlast.checkpoint.load.optimizer_fitting import fit_optimizer
from outlast.checkpoint.save.shard_plan import dtype_name
from outlast.checkpoint.script_state import ScriptState, Stateful
from outlast.checkpoint.state_content import (
    EXACT,
    NameMatching,
    Skeleton,
    class_of,
    is_within,
    parameter_owners,
)
from outlast.checkpoint.state_values import join_tensors, value_at

_CONTAINERS = (dict, list)


class SavedState(NamedTuple):
    """The state in a checkpoint: tensors, decoded `shared` value, and this rank's `rest`."""

    tensors: Mapping[str, Tensor]
    shared: Mapping[str, Any]
    rest: Mapping[str, Skeleton]


class StateFitting:
    """The differences, targets and final steps of a load into a live state.

    `differences`: all of them, in words; with any, nothing may be read. `targets`: the tensors to
    read into, by name. `spare`: names of the checkpoint that this rank lacks (another rank may have
    them, as a pipeline stage). After reading, `finish` restores all other values.

    The constructor changes nothing. With `complete=False`, entries that the state lacks are passed
    over. Without strict `matching`, names that the checkpoint lacks are in `missing`, and entries
    that the state lacks are in `unexpected`. `casts`: checkpoint types of targets with another
    type.
    """

    def __init__(
        self,
        state: ScriptState,
        saved: SavedState,
        *,
        complete: bool = True,
        matching: NameMatching = EXACT,
    ) -> None:
        self.state, self.saved, self.matching = state, saved, matching
        self.differences: list[str] = []
        self.missing: set[str] = set()
        self.unexpected: set[str] = set()
        self.casts: dict[str, torch.dtype] = {}
        self.targets: dict[str, torch.Tensor] = {}
        self._used_names: set[str] = set()
        self._steps: list[Callable[[], object]] = []
        fitting = self._entries(complete)
        for name in fitting:
            if name in state.modules:
                self._module(name, state.modules[name])
            elif name in state.optimizers:
                fit_optimizer(self, name)
            elif name in state.objects:
                self._object(name, state.objects[name])
            else:
                self._value(name, state.values[name])
        names = saved.tensors.keys() | saved.rest.keys()
        skipped = self._skipped_optimizer_state()
        self.spare = {
            name
            for name in names - self._used_names
            if self._entry_of(name) in fitting
            and not matching.skips(name)
            and not any(is_within(name, each) for each in skipped)
        }
        self._check_skipped(names)
        if self.missing and not self.targets:
            self.reject("strict=False", "nothing of this state is in the checkpoint")

    @torch.no_grad()
    def finish(self) -> None:
        """Restore all other values, once the targets are filled."""
        for step in self._steps:
            step()

    # --- helpers to fit one entry ------

    def reject(self, name: str, what: str) -> None:
        """Register a difference."""
        self.differences.append(f"{name}: {what}")

    def report_missing(self, name: str, what: str = "missing in the checkpoint") -> None:
        """Register a name that the checkpoint lacks: a difference, or missing if not strict."""
        if self.matching.strict:
            self.reject(name, what)
        else:
            self.missing.add(name)

    def add_step(self, step: Callable[[], object]) -> None:
        """Run this step in `finish`."""
        self._steps.append(step)

    def read_into(self, name: str, live: torch.Tensor) -> None:
        """Read the tensor `name` into `live`, if it fits."""
        saved = self.saved_tensor(name)
        if saved is None:
            self.report_missing(name)
            return
        if state_values.is_uninitialized(live):
            self.reject(name, "is not initialized here; run one forward first")
            return
        shape, dtype = tuple(live.shape), dtype_name(live.dtype)
        if tuple(saved.shape) != shape:
            self.reject(name, f"{tuple(saved.shape)} in the checkpoint, {shape} here")
        if saved.dtype != dtype and self.matching.casts(saved.dtype, dtype):
            self.casts[name] = getattr(torch, saved.dtype)
        elif saved.dtype != dtype:
            self.reject(name, f"{saved.dtype} in the checkpoint, {dtype} here")
        if live.is_meta:
            self.reject(name, "is on the meta device here; give it memory first (to_empty)")
        self.targets[name] = live

    def saved_tensor(self, name: str) -> Tensor | None:
        """Return the checkpoint's tensor of this name, or None."""
        self._used_names.add(name)
        return self.saved.tensors.get(name)

    def dtype_of(self, name: str, saved: Tensor) -> torch.dtype | None:
        """Return the element type for a new tensor; register a difference if torch lacks it."""
        dtype = getattr(torch, saved.dtype, None)
        if dtype is None:
            self.reject(
                name, f"{saved.dtype} in the checkpoint, which torch {torch.__version__} lacks"
            )
        return dtype

    def saved_skeleton(self, name: str) -> Skeleton | None:
        """Return the skeleton of an entry's values besides plain tensors, or None."""
        self._used_names.add(name)
        return self.saved.rest.get(name)

    def deferred_value(
        self, skeleton: Skeleton, live: Any = None, *, in_place: bool = False
    ) -> Callable[[], Any]:
        """Return a function for the value of a skeleton, valid after reading.

        Tensors are read into new ones: of the kind at the same path of the `live` value, or into
        that one itself with `in_place`.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, (path, device) in skeleton["holes"].items():
            saved = self.saved_tensor(name)
            if saved is None:
                self.reject(name, "missing in the checkpoint")
                continue
            there = value_at(live, path)
            if not isinstance(there, torch.Tensor) or not _has_same_form(there, saved):
                dtype = self.dtype_of(name, saved)
                if dtype is None:
                    continue
                spec = TensorSpec(saved.shape, dtype, device)
                tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=spec.home())
            elif in_place and not state_values.overlaps_itself(there):
                tensors[name] = there
            else:
                tensors[name] = torch.empty_like(there, requires_grad=False)
        self.targets |= tensors
        return lambda: join_tensors(skeleton, tensors)

    # --- entries ---

    def _entries(self, complete: bool) -> set[str]:
        """Return the entries that both sides have, of the same kind."""
        here, there = self.state.kinds, self.saved.shared["kinds"]
        names = [n for n in sorted(here.keys() | there.keys()) if not self.matching.skips(n)]
        for name in names:
            if name not in there:
                self.report_missing(name, f"the checkpoint has no such entry (here: {here[name]})")
            elif name not in here:
                if complete and self.matching.strict:
                    self.reject(name, f"{there[name]} that the state does not have")
                elif complete:
                    self.unexpected.add(name)
            elif here[name] != there[name]:
                self.reject(name, f"{there[name]} in the checkpoint, {here[name]} here")
        equal = {name for name in names if here.get(name) == there.get(name)}
        for name, part in (self.state.optimizers | self.state.objects).items():
            kind = self.saved.shared["classes"].get(name)
            if kind and class_of(part) and kind != class_of(part):
                self.reject(name, f"{kind} in the checkpoint, {class_of(part)} here")
                equal.discard(name)
        return equal

    def _skipped_optimizer_state(self) -> set[str]:
        """Return the names of optimizer state of skipped parameters."""
        names: set[str] = set()
        for name in self.saved.shared.get("optimizers", {}) if self.matching.skip else ():
            owner = parameter_owners(self.saved.shared, name, self.saved.tensors)
            names |= {f"{name}.state.{c}" for c, full in owner.items() if self.matching.skips(full)}
        return names

    def _check_skipped(self, there: Collection[str]) -> None:
        """Register names to be skipped that do not exist: these are mistakes."""
        state, kinds = self.state, self.saved.shared["kinds"]
        entries = {*state.kinds, *kinds, *state.own, *state.generators}
        modules = {n for n in kinds if kinds[n] == "module"} | state.modules.keys()
        inside = {f"{n}.{each.name}" for n, entries in state.entries.items() for each in entries}
        inside |= {name for name in there if self._entry_of(name) in modules}
        for each in self.matching.skip:
            if each not in entries and not any(is_within(name, each) for name in inside):
                self.reject(each, "is to be skipped, and is no entry and in no module")

    def _entry_of(self, name: str) -> str:
        kinds = self.saved.shared["kinds"]
        while name and name not in kinds:
            name = name.rpartition(".")[0]
        return name

    def _module(self, name: str, module: nn.Module) -> None:
        values: dict[str, Callable[[], Any]] = {}
        for entry in self.state.entries[name]:
            full = f"{name}.{entry.name}"
            if self.matching.skips(full):
                continue
            if entry.kind != "made":
                self.read_into(full, entry.value)
            elif (skeleton := self.saved_skeleton(full)) is None:
                self.report_missing(full)
            else:
                values[entry.key] = self.deferred_value(skeleton, entry.value)
        if values:
            # load_state_dict passes computed values to their hooks; the rest stays unchanged.
            self.add_step(
                lambda: module.load_state_dict(
                    module.state_dict() | {key: value() for key, value in values.items()}
                )
            )

    def _object(self, name: str, part: Stateful) -> None:
        skeleton = self.saved.shared["objects"][name]
        if isinstance(part, torch.amp.GradScaler) and bool(skeleton["value"]) != part.is_enabled():
            self.reject(name, "is enabled only here" if part.is_enabled() else "is disabled here")
        live = part.state_dict()
        value = self.deferred_value(skeleton, live)
        self.add_step(lambda: part.load_state_dict(state_values.restore_parameters(live, value())))

    def _value(self, name: str, live: Any) -> None:
        skeleton = self.saved.shared["values"][name]
        if isinstance(live, torch.Tensor):
            if skeleton["value"] is None and name in skeleton["holes"]:
                self.read_into(name, live)
            else:
                self.reject(name, "no tensor in the checkpoint, a tensor here")
            return
        state = self.state.given
        if not isinstance(live, _CONTAINERS) and not isinstance(state, MutableMapping):
            self.reject(name, f"a {type(live).__name__} can be put back only into a dict")
            return
        value = self.deferred_value(skeleton, live, in_place=True)

        def put_back() -> None:
            settled = state_values.restore_in_place(live, value())
            if settled is not live and isinstance(state, MutableMapping):
                state[name] = settled

        self.add_step(put_back)


def _has_same_form(live: torch.Tensor, saved: Tensor) -> bool:
    return tuple(live.shape) == tuple(saved.shape) and dtype_name(live.dtype) == saved.dtype
