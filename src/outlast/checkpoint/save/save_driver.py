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
from typing import Protocol

from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.checkpoint.save.agreed_plan import Exchange
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.errors import StorageError


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
    """One rank's saves and their outcomes. `poll` and `save` may run on different threads."""

    def __init__(
        self, settings: SaveSettings, exchange: Exchange, keeper: KeeperClient, owner: SaveOwner
    ) -> None:
        """Create the driver. `exchange` as in SaveEngine."""
        self.engine = SaveEngine(settings, exchange, keeper)
        self.keeper = keeper
        self._rank = settings.rank
        self._owner = owner
        self._open: set[int] = set()

    def save(self, request: SaveRequest) -> int:
        """Copy the state and order its write; return the save's number. Raises as SaveEngine."""
        save = self.engine.save(request)
        self._open.add(save)
        return save

    def poll(self) -> None:
        """Pass outcomes since the last call to the owner. Never blocks."""
        for outcome in self.engine.outcomes():
            if outcome.kind == "copied":
                self._owner.save_copied(outcome)
                continue
            if outcome.kind == "written" and outcome.error:
                self._owner.save_warned(outcome.error)
            if outcome.kind == "written" and self._rank == 0:
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
                self.engine.wait(save, max(0.0, deadline - time.monotonic()))
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
