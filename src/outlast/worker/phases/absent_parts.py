"""Agreement of ranks on a save, and the parts of absent ones, which their deputies write.

A deputy holds the same shards as the absent rank. The part is what the rank would come back with at
this place (returned_rank.py), so that a restart of all ranks goes on as though it had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from outlast.checkpoint.format.manifests import SavePoint
from outlast.errors import StorageError
from outlast.transport import messages
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.returned_rank import slot_of_absent
from outlast.worker.phases.script_progress import Intervals, ProgressSlot


class SaveProposal(msgspec.Struct, frozen=True, array_like=True):
    """One rank's message before a save.

    `failure`: why this rank cannot save. `ready`: memory for the copy is available. `every`: the
    next intervals. `place`, `parent` and `base` of the save. Rank 0's values apply for the last
    four. `slot`: of ranks of the first unit that is present, while others are absent.
    """

    failure: str
    ready: bool
    every: Intervals
    place: SavePoint
    parent: str
    base: str
    slot: bytes = b""


class AbsentParts:
    """Deputies of the absent ranks in the connected generation. A deputy of rank 0 has its role in
    saves."""

    def __init__(self, groups: GroupRegistry) -> None:
        self._groups = groups
        self._deputies: dict[int, int] = {}  # by absent rank
        self._left: dict[int, dict[str, bytes]] = {}  # slots of the absent ranks of this deputy

    def learn(self, body: messages.Connect) -> None:
        """Take the deputies of a generation, and what the absent ranks of this one have left."""
        self._deputies = dict(body.deputies)
        self._left = {rank: body.slots.get(rank, {}) for rank in self.of(self._groups.seat)}

    def of(self, seat: int) -> tuple[int, ...]:
        """Return the absent ranks whose deputy a rank is."""
        return tuple(rank for rank, deputy in self._deputies.items() if deputy == seat)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the absent ranks whose parts this rank writes."""
        return tuple(self._left)

    @property
    def leads(self) -> bool:
        """Return whether this rank has the role of rank 0 in saves."""
        return self._deputies.get(0, 0) == self._groups.seat

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank that is present, while others are absent."""
        return bool(self._groups.presence.absent) and self._present[0] == self._groups.seat

    @property
    def is_place(self) -> bool:
        """Return whether absent ranks would come back to the place of this one, or of others in its
        unit."""
        presence = self._groups.presence
        return bool(presence.absent) and self._groups.seat in presence.first_unit()

    @property
    def _present(self) -> tuple[int, ...]:
        return self._groups.presence.of(range(self._groups.world))

    def without_deputy(self) -> list[int]:
        """Return the absent ranks whose parts nobody can write."""
        return sorted(self._groups.presence.absent - self._deputies.keys())

    def check(self, tensors: Mapping[str, torch.Tensor], *, is_staged: bool) -> None:
        """Raise StorageError where a deputy does not hold the tensors of an absent rank: those on a
        mesh of its unit alone, and stages of a pipeline."""
        for rank in sorted(self._groups.presence.absent):
            meshes = (getattr(each, "device_mesh", None) for each in tensors.values())
            if is_staged or any(
                mesh is not None and rank not in mesh.mesh.flatten().tolist() for mesh in meshes
            ):
                raise StorageError(
                    f"rank {rank} is absent, and no other rank can write its part of a checkpoint:"
                    " its tensors are those of its replica's own mesh (tensor parallelism), or of"
                    " a stage of its pipeline"
                )

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's message, in order of rank; that of an absent one is its deputy's."""
        answers = dict(zip(self._present, self._groups.gather_bytes(data), strict=True))
        ranks = range(self._groups.world)
        return [answers[self._deputies.get(rank, rank)] for rank in ranks]

    def agree(self, mine: SaveProposal) -> list[SaveProposal]:
        """Return the proposals of all ranks, in order of rank."""
        answers = self.exchange(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(answer, type=SaveProposal) for answer in answers]

    def failures(self, answers: Sequence[SaveProposal]) -> list[str]:
        """Return why ranks that are present cannot save."""
        found = ((rank, answers[rank].failure) for rank in self._present)
        return [f"rank {rank}: {failure}" for rank, failure in found if failure]

    def slots(self, answers: Sequence[SaveProposal]) -> dict[int, ProgressSlot]:
        """Return the slots of the absent ranks of this deputy, at the place of a save."""
        found: dict[int, ProgressSlot] = {}
        for rank, own_slots in self._left.items():
            presence = self._groups.presence
            other = presence.first_unit()[presence.units.place_of(rank).place]
            place = ProgressSlot.unpack(answers[other].slot)
            found[rank] = slot_of_absent(place, own_slots, rank)
        return found
