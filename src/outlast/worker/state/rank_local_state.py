"""State that a script changes after the vote: equal on all ranks, or local to each.

An EMA of BatchNorm's statistics, or a scheduler that steps on a rank's own loss, differs by rank,
which is not known in advance. Each rank keeps such state in its slot, and votes compare it:

    part         contents                                    where ranks differ
    buffers      small buffers that change after the vote    each rank keeps its own
    schedulers   states of schedulers                        each rank keeps its own
    rates        hyperparameters and GradScalers             each keeps its own, and, because the
                                                             weights will differ, all of its state

A part that is equal on all ranks comes from a donor that has completed its phase. A rank writes
its slot at the end of the phase, instead of before the vote, in three cases: ranks differ; the
function's phases are not compared yet; or the function changes *open* state after its vote. A rank
that is lost before that end leaves no such slot, and all ranks restart from the newest copy.

    state that changes after the vote                          open: ranks may begin to differ
    schedulers whose `step` takes a metric                     yes
    schedulers whose `step` takes none, GradScalers            no
    hyperparameters of optimizers without such a scheduler     yes
    small buffers, but for the count of an AveragedModel       yes
    modes of modules, settings of FSDP2 modules                yes
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from outlast.checkpoint.format import codec
from outlast.errors import PhaseError
from outlast.transport.worker_page import SLOT_BYTES
from outlast.worker.state.optimizer_state import (
    hyperparameters,
    optimizer_adopt,
    optimizer_tree,
    put_in_groups,
)
from outlast.worker.state.tensor_digests import local_shard

if TYPE_CHECKING:
    from outlast.worker.state.protected_state import ProtectedState

BUFFERS, SCHEDULERS, RATES = PARTS = ("buffers", "schedulers", "rates")
EVERYTHING = "everything"
EVERYTHING_BYTES_MAX = SLOT_BYTES - (1 << 20)  # a slot also has generators and a data position


class StateStanding(msgspec.Struct, frozen=True, array_like=True):
    """Record of one rank's local state, exchanged when a vote shows that ranks differ."""

    place: str
    replica_set: bytes
    differing: tuple[str, ...]
    compared: tuple[str, ...]
    digests: dict[str, bytes]
    word: bytes = b""  # of a sentinel


class RankLocalState:
    """Local state of one rank. `differing`: the parts that differ by rank; `compared`: the
    functions after whose phases the ranks have compared them; `kept`: the parts restored from a
    slot, which a donor's do not replace."""

    def __init__(self, protected: ProtectedState) -> None:
        self._protected = protected
        self.differing: set[str] = set()
        self.compared: set[str] = set()
        self.kept: frozenset[str] = frozenset()
        self.lost_key = ""  # of a phase in place of whose lost result the script got NaN
        self._completed: set[str] = set()  # functions since the last comparison
        self._open: set[str] = set()  # functions that change open state after their votes
        self._open_look = b""  # open state at the last vote
        self._looks: dict[str, tuple[bytes, bytes]] = {}
        self._digests: dict[str, bytes] = {}
        self._key = ""  # of the function whose phase votes
        self._at_vote: dict[str, bytes] = {}  # rates and schedules at the last vote
        self._late: dict[str, set[str]] = {}  # ... that change after it, by function
        self._is_mixed = False  # pipeline stages: ranks that are not replicas differ

    # --- the slot ---

    def encode(self, *, whole: bool) -> dict[str, Any]:
        """Return this state for the rank's slot. `whole`: it cannot change before the slot's place;
        otherwise a donor's state takes precedence, except for rates and schedules that do not
        change between the vote and that place."""
        values = self._values()
        parts = {part: self._packed(part, value) for part, value in values.items()}
        self._at_vote = {} if whole else _looks_of(values)
        if whole and RATES in self.differing:
            parts[EVERYTHING] = codec.encode(self._everything())
        return {
            "parts": parts,
            "differing": sorted(self.differing),
            "compared": sorted(self.compared),
            "open": sorted(self._open),
            "whole": whole,
            "late": sorted(self._late.get(self._key, ())),
            "lost": self.lost_key,
        }

    def _packed(self, part: str, value: Any) -> bytes:
        """Return the value encoded; encode again only if it has changed."""
        look = _packed_plainly(value)
        before, data = self._looks.get(part, (b"", b""))
        if not look or look != before:
            data = codec.encode(value)
            self._looks[part] = look, data
            self._digests[part] = xxhash.xxh3_64_digest(data)
        return data

    def _values(self) -> dict[str, Any]:
        protected = self._protected
        groups = {name: hyperparameters(o) for name, o in protected.optimizers.items()}
        states: dict[str, dict[str, Any]] = {SCHEDULERS: {}, RATES: {}}
        for name, value in protected.schedules.items():
            states[part_of(value)][name] = value.state_dict()
        rates = {"groups": groups, "scalers": states[RATES]}
        return {BUFFERS: protected.buffers.late(), SCHEDULERS: states[SCHEDULERS], RATES: rates}

    def note_open_state(self, key: str) -> None:
        """Record the open state before the vote of a phase of function `key`."""
        self._key = key
        self._open_look = b"" if key in self._open else self._open_state()

    def _open_state(self) -> bytes:
        protected, late = self._protected, self._protected.buffers.late()
        averaged = [p for p in protected.tree.parts if late and isinstance(p, AveragedModel)]
        counts = {id(part.n_averaged) for part in averaged}
        schedules = protected.schedules.items()
        closed = {name: each for name, each in schedules if not takes_metric(type(each))}
        scheduled = {id(getattr(each, "optimizer", None)) for each in closed.values()}
        state = {
            "buffers": {key: b for key, b in late.items() if id(b) not in counts},
            "schedulers": {n: each.state_dict() for n, each in schedules if n not in closed},
            "groups": {
                name: hyperparameters(optimizer)
                for name, optimizer in protected.optimizers.items()
                if id(optimizer) not in scheduled
            },
            "modes": protected.tree.modes(),
            "fsdp": protected.iterations.settings(),
        }
        return _packed_plainly(state) or codec.encode(state)

    def _everything(self) -> dict[str, Any]:
        protected = self._protected
        return {
            "tensors": {
                f"{name}.{key}": local_shard(tensor.detach())
                for name, module in protected.modules.items()
                for key, tensor in [*module.named_parameters(), *module.named_buffers()]
            },
            "optimizers": {name: optimizer_tree(o) for name, o in protected.optimizers.items()},
        }

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Any], *, keep: bool) -> None:
        """Restore the state of the rank's last worker. `keep` it until the walk is over; otherwise
        a donor's state takes precedence."""
        protected = self._protected
        self.differing.update(saved["differing"])
        self.compared.update(saved["compared"])
        self._open.update(saved.get("open", ()))
        self.lost_key = self.lost_key or saved.get("lost", "")
        values = {part: codec.decode(data) for part, data in saved["parts"].items()}
        if not saved["whole"] and "late" in saved:  # until `join`: code between phases may read it
            self._put_rates(values, saved["late"])
        if not (saved["whole"] and (keep or self.differing)):
            return
        if EVERYTHING in values:
            live = self._everything()["tensors"]
            for name, tensor in values[EVERYTHING]["tensors"].items():
                live[name].copy_(tensor)
            for name, optimizer in protected.optimizers.items():
                optimizer_adopt(optimizer, values[EVERYTHING]["optimizers"][name])
        self._put_rates(values, ())
        protected.buffers.restore_late(values[BUFFERS])
        self.kept = frozenset(values)

    def _put_rates(self, values: Mapping[str, Any], late: Collection[str]) -> None:
        for name, groups in values[RATES]["groups"].items():
            optimizer = self._protected.optimizers[name]
            kept = [
                {k: v for k, v in g.items() if f"{name}.{k}" in late}
                for g in hyperparameters(optimizer)
            ]
            put_in_groups(optimizer, [saved | own for saved, own in zip(groups, kept, strict=True)])
        for name, state in (values[SCHEDULERS] | values[RATES]["scalers"]).items():
            if name not in late:
                self._protected.schedules[name].load_state_dict(state)

    # --- parts taken from a donor ---

    @property
    def takes_weights(self) -> bool:
        """Return whether a donor's modules and moments replace this rank's."""
        return EVERYTHING not in self.kept

    @property
    def takes_rates(self) -> bool:
        """Return whether a donor's hyperparameters replace this rank's."""
        return RATES not in self.kept

    def takes_object(self, name: str) -> bool:
        """Return whether a donor's state of this object replaces this rank's."""
        if name not in self._protected.schedules:
            return True
        return part_of(self._protected.schedules[name]) not in self.kept

    def kept_buffers(self) -> Collection[str]:
        """Return the names of the buffers that a donor's do not replace."""
        return self._protected.buffers.late().keys() if BUFFERS in self.kept else ()

    def is_audited(self, part: str) -> bool:
        """Return whether audits compare this part, because votes do not."""
        return self._is_mixed and part not in self.differing

    @property
    def has_replicas(self) -> bool:
        """Return whether another rank may hold this one's weights."""
        return RATES not in self.differing

    # --- votes ---

    def must_wait(self, key: str) -> bool:
        """Return whether a phase's slot can be written only when the phase is complete."""
        return bool(self.differing) or key not in self.compared or key in self._open

    def ballot(self) -> str:
        """Return the text, besides the place, that must be equal in all ranks' ballots."""
        parts = () if self._is_mixed else PARTS
        compared = [self._digests[part].hex() for part in parts if part not in self.differing]
        return " ".join([*sorted(self.differing), *compared])

    def completed(self, key: str, *, has_changed_buffers: bool) -> bool:
        """Record a complete phase of function `key`; `has_changed_buffers`: after its vote. Return
        whether rates or schedules have first changed after a vote, so that the slot has others."""
        self._completed.add(key)
        before, self._at_vote = self._at_vote, {}
        now = _looks_of(self._values()) if before else {}
        late = {name for name, look in now.items() if before.get(name) != look}
        is_new = not late <= self._late.setdefault(key, set())
        self._late[key] |= late
        look, self._open_look = self._open_look, b""  # "" without a vote before the phase's end
        if look and look != self._open_state():
            self._open.add(key)
        if has_changed_buffers:
            self.differing.add(BUFFERS)
        return is_new

    def won(self) -> None:
        """Record a vote in which all ballots were equal."""
        self.compared |= self._completed
        self._completed = set()

    def dispute(
        self,
        place: str,
        replica_set: bytes,
        exchange: Callable[[bytes], list[bytes]],
        tell: Callable[[str], None],
        word: bytes = b"",
    ) -> list[bytes]:
        """Determine on all ranks which parts differ, after a vote with unequal ballots; return the
        words of their sentinels.

        Raises PhaseError if the ranks are in different phases, or if the differing parts are too
        large for the slot.
        """
        mine = StateStanding(
            place,
            replica_set,
            tuple(sorted(self.differing)),
            tuple(sorted(self.compared)),
            self._digests,
            word,
        )
        answers = exchange(msgspec.msgpack.encode(mine))
        standings = [msgspec.msgpack.decode(each, type=StateStanding) for each in answers]
        if any(each.place != place for each in standings):
            raise PhaseError(
                f"the ranks are in different phases: this one votes on phase {place}; every rank"
                " must make the same calls of session.run in the same order"
            )
        if news := self._settle(standings):
            tell(
                f"{news} differ by rank: they are the rank's own from here on, as under torchrun; a"
                " rank that is lost while it steps brings all ranks back to the newest copy"
            )
        return [each.word for each in standings]

    def _settle(self, standings: Sequence[StateStanding]) -> str:
        before = set(self.differing)
        self.differing.update(*(each.differing for each in standings))
        self.compared.update(*(each.compared for each in standings))
        sets: dict[bytes, list[dict[str, bytes]]] = {}
        for each in standings:
            sets.setdefault(each.replica_set, []).append(each.digests)
        news = {
            part
            for digests in sets.values()
            for part in PARTS
            if len({each[part] for each in digests}) > 1
        } - self.differing
        self.differing |= news
        found = self.differing - before
        for part in PARTS:
            if part not in self.differing and len({each.digests[part] for each in standings}) > 1:
                self._is_mixed = True
        if RATES in found:
            self._must_fit()
        return ", ".join(_TOLD[part] for part in PARTS if part in found)

    def _must_fit(self) -> None:
        size = len(codec.encode(self._everything()))
        if size > EVERYTHING_BYTES_MAX:
            raise PhaseError(
                "hyperparameters of optimizers (learning rates), or the scale of a GradScaler,"
                " differ by rank: weights that they change would differ, too, so that no rank"
                f" could replace another, and a rank's state of {size} bytes does not fit its slot"
                f" of {EVERYTHING_BYTES_MAX}; nothing was applied; step the scheduler on a loss"
                " that is equal on all ranks (dist.all_reduce), or set equal rates"
            )


_TOLD = {
    BUFFERS: "buffers that change after optimizer.step",
    SCHEDULERS: "states of schedulers",
    RATES: "hyperparameters, and so all weights",
}


def _packed_plainly(value: Any) -> bytes:
    """Return plain values as bytes, more quickly than `codec` and only to compare them; b"" for
    others (a tensor, a long integer)."""
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, OverflowError):
        return b""


def _looks_of(values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return each hyperparameter ("optimizer.lr"), schedule and scaler, to compare."""
    named = dict(values[SCHEDULERS] | values[RATES]["scalers"])
    for name, groups in values[RATES]["groups"].items():
        for key in {*itertools.chain(*groups)}:
            named[f"{name}.{key}"] = [group.get(key) for group in groups]
    return {name: _packed_plainly(value) or codec.encode(value) for name, value in named.items()}


def part_of(value: Any) -> str:
    """Return the part to which the state of a scheduler or a GradScaler belongs."""
    return RATES if isinstance(value, torch.amp.GradScaler) else SCHEDULERS


@cache
def takes_metric(kind: type) -> bool:
    """Return whether a scheduler's next state may depend on more than its present one."""
    parameters = set(inspect.signature(kind.step).parameters)
    return issubclass(kind, LRScheduler) and not parameters <= {"self", "epoch"}
