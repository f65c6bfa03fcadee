"""Protected state: the three kinds that `Session.protect` takes, and how each is kept.

- *replicated*: modules, optimizers, schedulers, GradScaler, `Replicated(...)`. Equal on all ranks
  of a replica; a joiner gets it from a donor that has finished its phase.
- *rank-specific*: generators and the user's own small objects, kept in the page's slots.
- *attempt-local*: state that a refused attempt may have changed; see phase_attempt.py.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from outlast.checkpoint import state_values
from outlast.checkpoint.format import codec
from outlast.checkpoint.script_state import ScriptState, Stateful
from outlast.errors import CodecError, ProtectError
from outlast.random_state import GENERATOR_TYPES, Generator
from outlast.worker.script.carried_variables import CarriedVariables
from outlast.worker.state import generator_states
from outlast.worker.state.ddp_buckets import BucketState, DDPBuckets, must_fit_phase, refuse_hidden
from outlast.worker.state.optimizer_state import (
    Layer,
    by_first_name,
    describe_parameter_changes,
    group_members,
    layers_of,
    must_be_whole,
    must_fit,
    must_have_groups,
    must_keep_layers,
    optimizer_adopt,
    optimizer_tree,
)
from outlast.worker.state.pipeline_stages import PipelineStages, is_schedule
from outlast.worker.state.plain_objects import ProtectedParts
from outlast.worker.state.protected_modules import ModuleBuffers, ProtectedModules
from outlast.worker.state.rank_local_state import RankLocalState
from outlast.worker.state.sharded_modules import FSDPIterations, refuse_unsupported
from outlast.worker.state.tensor_digests import are_same, local_shards, must_match


class Replicated:
    """Marker of an object whose state is equal on all ranks (an EMA of the weights). It travels
    with the model, not in the slot, and changes only after `optimizer.step` or between phases."""

    def __init__(self, target: Stateful) -> None:
        kind = type(target).__name__
        if isinstance(target, nn.Module):
            raise ProtectError(f"Replicated({kind}): give session.protect the module itself")
        if not isinstance(target, Stateful):
            raise ProtectError(f"Replicated({kind}) needs state_dict and load_state_dict")
        self.target = target


class ProtectedState:
    """State of the script by name. Raises ProtectError for an object that cannot be kept."""

    def __init__(self, named: Mapping[str, Any], state: dict[str, Any]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.schedules: dict[str, Stateful] = {}  # schedulers and scalers
        self.copies: dict[str, Stateful] = {}  # targets of Replicated
        self.copying: set[str] = set()  # names of those whose state_dict copies tensors
        self.tensor_counts: dict[str, int] = {}  # of those, at the last check for copies
        self.generators: dict[str, Generator] = {}
        self.loaders: list[Any] = []
        self.pipeline = PipelineStages()
        self.own: dict[str, Stateful | dict[Any, Any] | list[Any]] = {"state": state}
        self._given = ProtectedParts(named, (Replicated,), self._place)
        self._add_stages()
        parameters = {id(p) for module in self.modules.values() for p in module.parameters()}
        for name, optimizer in self.optimizers.items():
            if any(id(p) not in parameters for g in optimizer.param_groups for p in g["params"]):
                raise ProtectError(
                    f"optimizer {name!r} updates a parameter that no protected module holds:"
                    " protect that module too, or a replacement worker would not get it"
                )
        self._groups = {name: group_members(each) for name, each in self.optimizers.items()}
        self.tree = ProtectedModules(self.modules, self.optimizers.values())
        refuse_unsupported(self.modules)
        refuse_hidden(part for module in self.modules.values() for part in module.modules())
        self.reducers = DDPBuckets(lambda: self.tree.reducers)
        self.iterations = FSDPIterations(self.tree)
        self.parameters = self.tree.parameters()  # `check_unchanged` holds each phase to them
        self._parameter_names = self.tree.parameter_names
        self._named = dict(self.tree.named_parameters())
        self.audited = by_first_name(self._named)
        self._layers: list[Layer] = []  # in the first phase
        self.buffers = ModuleBuffers(self.tree)
        self.local = RankLocalState(self)
        self.script: CarriedVariables | None = None  # variables not named in protect()
        self._known, self._looked = set[str](), 0
        self._check_movable()

    def _place(self, name: str, value: Any) -> None:
        if name == "state":
            raise ProtectError("the name 'state' is taken by session.state")
        if isinstance(value, nn.Module):
            self.modules[name] = value
        elif isinstance(value, torch.optim.Optimizer):
            must_be_whole(name, value)
            self.optimizers[name] = value
        elif isinstance(value, Replicated):
            self.copies[name] = value.target
        elif isinstance(value, (LRScheduler, torch.amp.GradScaler)):
            self.schedules[name] = value
        elif is_schedule(value):
            self.pipeline.add(name, value)
        elif isinstance(value, GENERATOR_TYPES):
            self.generators[name] = value
        elif isinstance(value, torch.utils.data.DataLoader):
            self.loaders.append(value)  # its position is kept by `batches`
        elif isinstance(value, (Stateful, dict, list)):
            self.own[name] = value
        else:
            raise ProtectError(f"cannot protect {name!r} ({type(value)}): use session.state")

    def _add_stages(self) -> None:
        """Protect the modules of stages that the script has not named itself."""
        named = {id(p) for module in self.modules.values() for p in module.parameters()}
        for name, module in self.pipeline.modules().items():
            if any(id(p) not in named for p in module.parameters()):
                self.modules[name] = module

    @property
    def objects(self) -> dict[str, Stateful]:
        """Return the replicated objects that are neither modules nor optimizers."""
        return {**self.schedules, **self.copies}

    @property
    def scalers(self) -> dict[str, torch.amp.GradScaler]:
        """Return the enabled gradient scalers, which may skip an optimizer's step."""
        scalers = {n: o for n, o in self.schedules.items() if isinstance(o, torch.amp.GradScaler)}
        return {n: scaler for n, scaler in scalers.items() if scaler.is_enabled()}

    def check_unchanged(self) -> None:
        """Raise ProtectError if a module or an optimizer was changed after `protect`."""
        self._given.must_be_there()
        self.tree.refresh()
        names = self.tree.parameter_names
        if not are_same(self.tree.parameters(), self.parameters) or names != self._parameter_names:
            now = dict(self.tree.named_parameters())
            changes = describe_parameter_changes(self._named, now, self.tree.types())
            raise ProtectError(
                f"a protected module has other parameters than at protect() ({changes}):"
                " a replacement worker cannot follow that; build, convert, prune, tie and wrap"
                " everything first, then protect; nothing was applied"
            )
        self._layers = must_keep_layers(self._layers, layers_of(self.tree.named_parts))
        self._check_hooks()
        self.check_groups()
        if len(self._known) > self._looked:  # a first step adds moments and averages
            self._looked = len(self._known)
            self._check_movable()

    def check_groups(self) -> None:
        """Raise ProtectError if an optimizer has other groups than at `protect`."""
        for name, optimizer in self.optimizers.items():
            must_have_groups(name, optimizer, self._groups[name], self.tree.named_parameters)

    def _check_movable(self) -> None:
        """Raise ProtectError if a value cannot be sent to a replacement worker, as donors must."""
        try:
            codec.flatten(self.replicated())
            self.own_choices()
        except CodecError as error:
            raise ProtectError(f"no other worker could take over {error}") from error

    def knows(self, key: str) -> bool:
        """Return whether a phase of this function has completed here: its changes are known."""
        return key in self._known or key.startswith("outlast.")

    def completed(self, key: str) -> None:
        """Record that a phase of this function is complete."""
        self.buffers.mark_end()
        self.tree.remember_hooks()
        if not self.knows(key):
            self._known.add(key)

    def _check_hooks(self) -> None:
        ours = (*self.objects.values(), *self.own.values())
        known = {id(getattr(each, "target", each)) for each in ours}
        for part in self.tree.reducers:
            must_fit_phase(part, known)

    def schema(self) -> tuple[str, str]:
        """Return (digest, summary) of names, shapes and dtypes; the run stops if ranks differ."""
        lines = [
            f"{name}.{key} {tuple(t.shape)} {t.dtype}"
            for name, module in self.modules.items()
            for key, t in [*module.named_parameters(), *module.named_buffers()]
        ]
        lines += [
            f"{n}: {type(o).__name__} {[len(g['params']) for g in o.param_groups]}"
            for n, o in self.optimizers.items()
        ]
        lines += sorted([*self.objects, *self.generators, *self.own, self.pipeline.identity])
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        numbers = sum(p.numel() for m in self.modules.values() for p in m.parameters())
        return digest, f"{len(lines)} entries, {numbers} parameters, {lines[:1]} ..."

    def settle(self) -> None:
        """End pending work of DDP and FSDP2 before the attempt votes."""
        self.pipeline.must_be_complete(self.modules)
        self.pipeline.must_repeat(self.buffers.own)
        self.reducers.settle()
        self.iterations.settle()

    # --- rank-specific ---

    def own_state(self, choices: bytes, *, whole: bool = True) -> bytes:
        """Encode the rank-specific state: `choices` (of `own_choices`), own buffers, modes, and the
        parts of RankLocalState. `whole`: the phase of this state is complete."""
        return codec.encode(
            {
                "buffers": self.buffers.own(),
                "choices": choices,
                "modes": self.tree.modes(),
                "gradients": self.tree.gradients(),
                "fsdp": self.iterations.settings(),
                "pipeline": self.pipeline.state(),
                "local": self.local.encode(whole=whole),
            }
        )

    def own_choices(self, phase: str = "") -> bytes:
        """Encode what the script may change: generators, own objects, variables at a `phase`."""
        objects = {name: _content(value) for name, value in self.own.items()}
        choices = {
            "random": generator_states.capture(self.generators),
            "objects": objects,
            "trained": list(state_values.trained(objects)),
            "script": self.script.state(phase) if self.script is not None else {},
        }
        try:
            return codec.encode(choices)
        except CodecError:
            if self.script is None:
                raise
            self.script.check()  # raises where a variable of the script is the cause
            return codec.encode({**choices, "script": self.script.state(phase)})

    def restore_own(self, own: bytes, *, keep: bool | None = None) -> None:
        """Restore the result of `own_state` into the script's objects. `keep`: see
        `RankLocalState.restore`; None if this worker has the rank already."""
        state = codec.decode(own)
        if keep is not None and "local" in state:
            self.local.restore(state["local"], keep=keep)
        saved = codec.decode(state["choices"])
        generator_states.restore(saved["random"], self.generators)
        self.buffers.restore_own(state["buffers"])
        self.tree.set_modes(state.get("modes", b""))
        self.iterations.set_settings(state.get("fsdp", []))
        if self.pipeline:
            self.pipeline.restore(state.get("pipeline", {}))
        self.tree.set_gradients(state.get("gradients", b""))
        self.restore_choices(saved)

    def restore_choices(self, saved: Mapping[str, Any]) -> None:
        """Restore the script's own objects and variables, but not its generators."""
        objects = saved["objects"]
        if objects.keys() != self.own.keys():
            raise ProtectError(
                f"the saved objects are {sorted(objects)}, the script protects {sorted(self.own)}"
            )
        now = {name: _content(value) for name, value in self.own.items()}
        objects = state_values.retrained(objects, saved.get("trained"), now)
        if self.script is not None:
            self.script.restore(saved.get("script", {}))
        for name, value in self.own.items():
            if state_values.is_same(_content(value), objects[name]):
                continue
            if isinstance(value, (dict, list)):
                state_values.restore_in_place(value, objects[name])
            else:
                value.load_state_dict(objects[name])

    # --- replicated ---

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return approximately the tensors of a save, under arbitrary names; runs no script code.

        Covers parameters, buffers and tensors of the optimizers' states.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, module in self.modules.items():
            named = [*module.named_parameters(), *module.named_buffers()]
            tensors |= {f"{name}.{inner}": tensor for inner, tensor in named}
        for name, optimizer in self.optimizers.items():
            states = [each for each in optimizer.state.values() if isinstance(each, Mapping)]
            tensors |= {
                f"{name}.state.{number}.{key}": value
                for number, state in enumerate(states)
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        return tensors

    def content(self) -> ScriptState:
        """Return the state for a checkpoint, under names that do not depend on the wrapping."""
        modules, optimizers = self.modules, self.optimizers
        modules = self.pipeline.by_stages(modules, optimizers) if self.pipeline else modules
        return ScriptState({**modules, **optimizers, **self.objects})

    def replicated(self) -> dict[str, Any]:
        """Return the state that a joiner needs from a donor: shards by reference, no copies."""
        objects = {name: o.state_dict() for name, o in self.objects.items()}
        return {
            "modules": {
                name: {
                    "parameters": local_shards(module.named_parameters()),
                    "buffers": local_shards(module.named_buffers()),
                }
                for name, module in self.modules.items()
            },
            "optimizers": {name: optimizer_tree(o) for name, o in self.optimizers.items()},
            "objects": objects,
            "trained": list(state_values.trained(objects)),
            "ddp": msgspec.to_builtins(self.reducers.states()),
            "gradients": self.tree.gradients(),
        }

    @torch.no_grad()
    def adopt(self, state: Mapping[str, Any]) -> None:
        """Copy a donor's `replicated()` into this worker, except parts kept from the rank's slot.
        Raises ProtectError, without any change, if the shapes do not match."""
        named = {"modules": self.modules, "optimizers": self.optimizers, "objects": self.objects}
        for what, live in named.items():
            if state[what].keys() != live.keys():
                raise ProtectError(
                    f"the saved {what} are {sorted(state[what])}, the script protects"
                    f" {sorted(live)}; nothing was taken over"
                )
        for name, optimizer in self.optimizers.items():
            must_fit(name, optimizer, state["optimizers"][name])
        reducers = msgspec.convert(state["ddp"], list[BucketState])
        own, local = {*self.buffers.own(), *self.local.kept_buffers()}, self.local
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, module in self.modules.items():
            for kind, live in (
                ("parameters", local_shards(module.named_parameters())),
                ("buffers", local_shards(module.named_buffers())),
            ):
                saved = state["modules"][name][kind]
                must_match(f"{name} {kind}", saved, live)
                pairs += [
                    (tensor, saved[key])
                    for key, tensor in live.items()
                    if kind == "parameters" or f"{name}.{key}" not in own
                ]
        for target, source in pairs if local.takes_weights else ():
            target.copy_(source)
        for name, optimizer in self.optimizers.items() if local.takes_weights else ():
            optimizer_adopt(optimizer, state["optimizers"][name], rates=local.takes_rates)
        objects = state_values.retrained(copy.deepcopy(state["objects"]), state["trained"])
        for name, value in self.objects.items():
            if local.takes_object(name):
                value.load_state_dict(objects[name])
        self.reducers.adopt(reducers)
        self.tree.set_gradients(state["gradients"])
        self.buffers.look_away()


def _content(value: Any) -> Any:
    """Return the content of a rank's own object."""
    return value if isinstance(value, (dict, list)) else value.state_dict()
