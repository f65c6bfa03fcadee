"""Restore of one rank's state from a checkpoint, in memory or on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.load.state_fitting import SavedState, StateFitting
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.replicas.memory_copies import KEEPER_DOORS, MemoryCopies, door_of
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import WorkerSettings
from outlast.errors import CorruptionError, MismatchError
from outlast.transport import messages
from outlast.worker.phases.script_progress import ProgressSlot, RankPart
from outlast.worker.state.protected_state import ProtectedState


class RunRestorer:
    """A checkpoint from which this rank restarts, in memory or on disk.

    Raises CorruptionError when it is damaged or of another version, StorageError when it cannot be
    read.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        seat: int,
        origin: messages.Checkpointed,
        *,
        beside_trainers: bool = False,
    ) -> None:
        """Open the checkpoint; `beside_trainers`: other ranks run, and their keepers serve them."""
        self._copies: MemoryCopies | None = None
        if origin.tier == "memory":
            self._copies = MemoryCopies.reach(
                _keepers(settings),
                settings.token,
                f"rank {seat}, starting",
                beside_trainers=beside_trainers,
            )
        path = Path(origin.path)
        place = SavePoint.parse(path.name)
        if place is None:
            raise CorruptionError(f"{path} is not a checkpoint's name; nothing was loaded")
        self._checkpoint = open_checkpoint(self._copies or Folder(path.parent), place)
        self.reader = CheckpointReader(self._checkpoint)
        where = f"{self._checkpoint.where}, rank {seat}"
        self._part = RankPart.unpack(self.reader.blob(seat, "own"), where)
        self.slot = self._part.slot
        self.place = place
        self.shared = dict(self._part.shared)

    @torch.no_grad()
    def restore(self, protected: ProtectedState) -> None:
        """Restore the protected state. Raises MismatchError with all differences before any
        change."""
        shared = codec.decode(self.reader.blob(0, "shared"))
        saved = SavedState(self._checkpoint.tensors, shared, shared["rest"])
        fitting = StateFitting(protected.content(), saved)
        # Buffers that are one rank's own, and large, are in its slot and not among the tensors.
        own = codec.decode(ProgressSlot.unpack(self.slot).own)
        differences = [
            line
            for line in fitting.differences
            if line.removesuffix(": missing in the checkpoint") not in own["buffers"]
        ]
        spare = protected.pipeline.names_here(fitting.spare, fitting.targets)
        differences += [f"{name}: missing here" for name in spare]
        if differences:
            raise MismatchError(
                f"{self._checkpoint.where} does not fit what the script protects; nothing was"
                " touched; start the script that wrote it. Differences:\n  "
                + "\n  ".join(sorted(differences))
            )
        fill_tensors(self.reader, {n: t for n, t in fitting.targets.items() if n in saved.tensors})
        fitting.finish()
        protected.reducers.adopt(self._part.ddp)
        protected.tree.set_gradients(own.get("gradients", b""))
        self.close()

    def close(self) -> None:
        """Release the copies in memory."""
        if self._copies:
            self._copies.close()


def _keepers(settings: WorkerSettings) -> list[str]:
    """Return the addresses of the keepers of all ranks."""
    folder = Path(settings.run_dir) / KEEPER_DOORS
    if settings.shares_keepers:
        return [door_of(folder, rank) for rank in range(settings.world)]
    return [keeper_address(settings, rank) for rank in range(settings.world)]


def keeper_address(settings: WorkerSettings, seat: int) -> str:
    """Return the address of a seat's keeper."""
    return f"{settings.keepers}{seat}"
