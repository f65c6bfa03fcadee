"""The checkpoint driver: one rank's saves, each from its request to its outcome.

Two owners drive their saves with it. They differ before a request and after an outcome:

|                 | `Checkpointer`                     | `RunCheckpointer` (`outlast run`)        |
|-----------------|------------------------------------|------------------------------------------|
| time of a save  | the script's call                  | a phase; a refused vote voids the save   |
| ranks agree by  | `RankGroup`, when tables change    | the control group, before every save     |
| keeper          | a process of this trainer          | the launcher's, which outlives trainers  |
| directory       | claimed with a token, own upkeep   | the launcher's                           |
| outcomes        | warnings or StorageError, later    | messages to the controller, at once      |
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.checkpoint.save.agreed_plan import Exchange
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.errors import StorageError

_RANK_SHIFT = 32  # of an absent rank in the numbers of its saves


class SaveOwner(Protocol):
    """Receiver of outcomes."""

    def save_copied(self, outcome: Outcome) -> None:
        """Peers hold copies of a save in memory; `outcome.error` names those that do not."""

    def save_warned(self, text: str) -> None:
        """Report damage that a save found in an older file, and repaired."""

    def save_ended(self, outcome: Outcome) -> None:
        """Report a save's last outcome.

        "committed" on rank 0, "written" on other ranks, "held" in memory; or "failed", "skipped".
        """


class OutcomeQueue:
    """An owner that keeps outcomes until they are taken."""

    def __init__(self) -> None:
        self._damage: list[str] = []
        self._ended: list[Outcome] = []

    def save_copied(self, outcome: Outcome) -> None:
        """Drop it: copies end no save."""

    def save_warned(self, text: str) -> None:
        """Keep damage."""
        self._damage.append(text)

    def save_ended(self, outcome: Outcome) -> None:
        """Keep the last outcome of a save."""
        self._ended.append(outcome)

    def take(self) -> tuple[list[str], list[Outcome]]:
        """Return damage and last outcomes since the last call."""
        damage, ended = self._damage, self._ended
        self._damage, self._ended = [], []
        return damage, ended


class SaveDriver:
    """One rank's saves and their outcomes. `poll` and `save` may run on different threads.

    While ranks are absent, it also saves the parts of those whose deputy this rank is, each with an
    engine of its own and the same keeper.
    """

    def __init__(
        self, settings: SaveSettings, exchange: Exchange, keeper: KeeperClient, owner: SaveOwner
    ) -> None:
        """Create the driver. `exchange` as in SaveEngine."""
        self.engine = SaveEngine(settings, self._exchange, keeper)
        self.keeper = keeper
        self._exchange_now = exchange
        self._settings = settings
        self._owner = owner
        self._open: set[int] = set()
        self._absent: dict[int, SaveEngine] = {}  # by absent rank, in this save or before
        self._ranks: tuple[int, ...] = ()  # absent ones in the next save
        self._answers: list[list[bytes]] = []  # of this rank's engine in the save under way
        self._repeated = 0  # of these, by the engine of an absent rank

    def _exchange(self, data: bytes) -> list[bytes]:
        self._answers.append(self._exchange_now(data))
        return self._answers[-1]

    def _repeat_exchange(self, _data: bytes) -> list[bytes]:
        """Return what this rank's engine got: a deputy holds what the absent rank would."""
        self._repeated += 1
        return self._answers[self._repeated - 1]

    def _engine_of(self, rank: int) -> SaveEngine:
        if rank not in self._absent:
            settings, first_save = replace(self._settings, rank=rank), (rank + 1) << _RANK_SHIFT
            engine = SaveEngine(settings, self._repeat_exchange, self.keeper, first_save=first_save)
            self._absent[rank] = engine
        return self._absent[rank]

    def rank_of(self, save: int) -> int:
        """Return the rank whose part a save is."""
        return (save >> _RANK_SHIFT) - 1 if save >> _RANK_SHIFT else self._settings.rank

    def agree_anew(self) -> None:
        """Make all ranks compare tables at the next save. All call it."""
        for engine in (self.engine, *self._absent.values()):
            engine.agree_anew()

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        blobs_bytes: int,
        rank_specific: Collection[str],
        absent: tuple[int, ...] = (),
    ) -> None:
        """Plan a save, and create arenas; all ranks call it. `absent`: the ranks whose parts this
        rank saves, too. Raises as SaveEngine."""
        self._ranks, self._answers = absent, []
        self.engine.prepare(tensors, blobs_bytes, rank_specific)
        for rank in absent:
            self._repeated = 0
            self._engine_of(rank).prepare(tensors, blobs_bytes, rank_specific)

    @property
    def is_ready(self) -> bool:
        """Return whether a save would copy at once, and interrupt no transfer to peers."""
        return all(each.ready for each in (self.engine, *map(self._engine_of, self._ranks)))

    def save(self, request: SaveRequest, absent: Mapping[int, bytes] | None = None) -> int:
        """Copy the state and order its write; return the save's number. Raises as SaveEngine.
        `absent`: the own state of each rank given to `prepare`."""
        save = self.engine.save(request)
        self._open.add(save)
        for rank, own in (absent or {}).items():
            self._open.add(self._engine_of(rank).save(replace(request, own=own)))
        return save

    def complete(self) -> None:
        """Release older versions, after every rank has copied the last save."""
        self.engine.complete()
        needed = {*self._ranks, *map(self.rank_of, self._open)}
        for rank in self._absent.keys() - needed:
            if self._absent[rank].release():
                del self._absent[rank]

    def poll(self) -> None:
        """Pass outcomes since the last call to the owner. Never blocks."""
        engines = (self.engine, *self._absent.values())
        for outcome in [outcome for engine in engines for outcome in engine.outcomes()]:
            if outcome.kind == "copied":
                self._owner.save_copied(outcome)
                continue
            if outcome.kind == "written" and outcome.error:
                self._owner.save_warned(outcome.error)
            if outcome.kind == "written" and self.rank_of(outcome.save) == 0:
                continue  # the commit follows
            self._open.discard(outcome.save)
            self._owner.save_ended(outcome)

    def wait(self, timeout_s: float) -> list[str]:
        """Wait until all saves have ended; return the errors of those that have not.

        The keeper continues with these.
        """
        deadline = time.monotonic() + timeout_s
        errors: list[str] = []
        for save in list(self._open):
            try:
                rank = self.rank_of(save)
                engine = self._absent[rank] if save >> _RANK_SHIFT else self.engine
                engine.wait(save, max(0.0, deadline - time.monotonic()))
            except StorageError as error:
                errors.append(str(error))
        return errors

    def close(self, timeout_s: float) -> None:
        """Wait for writes, end the keeper, and pass all outcomes to the owner.

        Raises StorageError naming saves that have not ended, after the outcomes of the others.
        """
        try:
            self.engine.close(timeout_s)
        finally:
            self.poll()


def describe_failure(outcome: Outcome, rank: int) -> str:
    """Return the message of a failed or skipped save of this rank."""
    where = f"the save of step {outcome.place.step} {outcome.kind} on rank {rank}"
    return outcome.error if outcome.error.startswith(where) else f"{where}: {outcome.error}"
