"""Tape of the collectives of one attempt: what this rank contributed, and what came of it.

A tape records an attempt, or plays: it answers collectives by the results of a recorded tape, so
that another rank's inputs give that rank's contributions without any other rank. That is possible
for collectives whose results are equal on all ranks:

| collective | contribution | result |
|---|---|---|
| all-reduce | the input | equal on all ranks |
| all-gather | the input | equal on all ranks |
| broadcast | the input of its root | equal on all ranks |
| barrier | none | none |
| anything else, or in a group of some ranks only | | the tape is unfit |

Gradients are digested as well when they are accumulated, hence before DDP reduces them: they have
names. A recorded collective is waited for at once, and its result copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import xxhash
from torch.utils.hooks import RemovableHandle, unserializable_hook

from outlast.errors import GroupError, StepRefused
from outlast.worker.groups import closed_answers
from outlast.worker.groups.work_handles import FinishedWork, opaque, opaque_class
from outlast.worker.state.tensor_digests import Word, values_of, word_of

if TYPE_CHECKING:
    from outlast.worker.groups import GroupRegistry
    from outlast.worker.groups.stable_group import StableGroup
    from outlast.worker.state.protected_state import ProtectedState

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # whose memory is their own
_RESULT = "result of "  # prefix of names of what is no contribution
_REDUCED = ("allreduce", "allreduce_coalesced")
_GATHERED = (
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
)


class _Entry(NamedTuple):
    op: str
    shapes: tuple[torch.Size, ...]  # of what it writes
    results: list[torch.Tensor]


@opaque_class
class CollectiveTape:
    """Collectives of one attempt, played from `recorded` or, without it, recorded.

    `rank`: whose contributions they are. `keeps`: results, to be played. `why`: the tape is unfit;
    "" if it is complete.
    """

    def __init__(
        self, rank: int, recorded: CollectiveTape | None = None, *, keeps: bool = False
    ) -> None:
        self._rank, self._recorded, self.keeps = rank, recorded, keeps
        self._entries: dict[int, list[_Entry]] = {}  # by group
        self._words: list[tuple[str, Word]] = []
        self.why = ""

    @contextmanager
    def running(self, groups: GroupRegistry, protected: ProtectedState) -> Iterator[None]:
        """Record or play the collectives, and digest gradients, inside this context."""
        handles: list[RemovableHandle] = []
        groups.tape = self
        try:
            for name, parameter in protected.audited:
                if parameter.requires_grad:
                    hook = unserializable_hook(opaque(self._accumulated(name)))
                    handles.append(parameter.register_post_accumulate_grad_hook(hook))
            yield
        finally:
            groups.tape = None
            for handle in handles:
                handle.remove()

    def _accumulated(self, name: str) -> Any:
        def accumulated(parameter: torch.Tensor) -> None:
            if type(parameter.grad) is torch.Tensor and parameter.grad.layout is torch.strided:
                self._words.append((f"{name}.grad", word_of(parameter.grad.detach())))

        return accumulated

    def carry(
        self, group: StableGroup, op: str, args: tuple[Any, ...], values: tuple[Any, ...]
    ) -> Any:
        """Run a collective of a group, or answer it. `values`: all of its arguments."""
        place = len(self._entries.setdefault(group.number, []))
        name = f"reduction {place + 1} of the phase ({op})"
        try:
            outputs = closed_answers.outputs_of(op, args)
            if len(group.ranks) != group.registry.world:
                self.refuse(f"{op} in a group of {len(group.ranks)} of the ranks")
            inputs = self._inputs(group, op, values)
            if any(type(tensor) not in _PLAIN for tensor in (*inputs, *outputs)):
                raise TypeError("tensors of another class")
            self._words += [(name, word_of(tensor.detach())) for tensor in inputs]
        except (RuntimeError, TypeError) as error:  # a layout that has no digest
            self.refuse(f"{op} ({error})")
            outputs = []
        entry = _Entry(op, tuple(tensor.shape for tensor in outputs), [])
        self._entries[group.number].append(entry)
        if self._recorded is not None:
            return self._played(group.number, place, entry, outputs)
        work = group.carry_live(op, args, values)
        if not self.why:
            self._keep(work, entry, name, outputs)
        return work

    def _inputs(self, group: StableGroup, op: str, values: Sequence[Any]) -> list[torch.Tensor]:
        if op in _REDUCED:
            return closed_answers.outputs_of(op, values)
        if op in _GATHERED:
            return closed_answers.outputs_of(op, values[1:])
        if op == "broadcast":
            root = group.ranks[closed_answers.root_of(values[1] if len(values) > 1 else 0)]
            return closed_answers.outputs_of(op, values) if root == self._rank else []
        if op != "barrier":
            self.refuse(f"{op}, whose result differs by rank")
        return []

    def _keep(self, work: Any, entry: _Entry, name: str, outputs: Sequence[torch.Tensor]) -> None:
        try:
            if work is not None:
                work.wait()
        except (RuntimeError, GroupError):  # its owner waits as well, and gets the error
            self.why = "its generation ended"
            return
        self._words += [(_RESULT + name, word_of(tensor.detach())) for tensor in outputs]
        if self.keeps:
            entry.results.extend(tensor.detach().clone() for tensor in outputs)

    @torch.no_grad()
    def _played(
        self, group: int, place: int, entry: _Entry, outputs: Sequence[torch.Tensor]
    ) -> FinishedWork:
        assert self._recorded is not None
        known = self._recorded._entries.get(group, [])  # noqa: SLF001 - of this class
        if place >= len(known) or known[place][:2] != entry[:2]:
            self.refuse(f"other collectives than in its own phase ({entry.op})")
        else:
            for output, result in zip(outputs, known[place].results, strict=True):
                output.copy_(result)
        return FinishedWork(outputs)

    def refuse(self, why: str) -> None:
        """Make this tape unfit; end a replay at once, unless autograd has to finish first."""
        self.why = self.why or why
        is_in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public function
        if self._recorded is not None and not is_in_backward:
            self._end()

    def _end(self) -> NoReturn:
        raise StepRefused(f"the phase cannot be replayed: {self.why}")

    def first_difference(self, other: CollectiveTape) -> tuple[bool, str]:
        """Return the name of the first contribution or result that differs from another tape's, and
        whether it is a contribution; "" for none. What follows it may differ because of it."""
        pairs = itertools.zip_longest(self._values(), other._values(), fillvalue=("", b""))
        for (name, value), (other_name, other_value) in pairs:
            if (name, value) != (other_name, other_value):
                return not name.startswith(_RESULT), name or other_name
        return False, ""

    def _values(self) -> list[tuple[str, bytes]]:
        values = values_of([word for _, word in self._words])
        return [(name, value) for (name, _), value in zip(self._words, values, strict=True)]

    def names(self) -> dict[str, bytes]:
        """Return the digests of contributions by name; several of one name are joined."""
        found: dict[str, bytes] = {}
        for name, value in self._values():
            if name.startswith(_RESULT):
                continue
            found[name] = xxhash.xxh3_64_digest(found[name] + value) if name in found else value
        return found

    def digest(self) -> bytes:
        """Return one digest of all contributions."""
        state = xxhash.xxh3_64()
        for name, value in sorted(self.names().items()):
            state.update(name.encode("utf-8", "surrogatepass") + value)
        return state.digest()
