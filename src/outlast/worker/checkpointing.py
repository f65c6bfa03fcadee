"""Saving and loading a whole job's state between steps, as a phase of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from outlast import events, wire
from outlast.checkpoint.store import Checkpoint, Draft, Part, prune
from outlast.core.faults import Where
from outlast.errors import CorruptionError, StorageError
from outlast.worker.groups import Groups
from outlast.worker.moment import Moment
from outlast.worker.protected import Protected
from outlast.worker.timeline import Timeline

KEEP = 2


class Checkpointer:
    """Writes one checkpoint together with the other ranks; loads this rank's part of one."""

    def __init__(
        self, *, root: Path, job: str, seat: int, groups: Groups, moment: Moment,
        timeline: Timeline, send: Callable[[wire.WorkerBody], None], watch: Callable[[Where], None],
    ) -> None:  # fmt: skip
        self._root, self._job, self._seat = root, job, seat
        self._groups, self._moment, self._timeline = groups, moment, timeline
        self._send, self._watch = send, watch

    def save(self, protected: Protected, slot: bytes) -> None:
        """Inside a phase. A disk that fails costs this checkpoint and nothing else: it is said,
        older checkpoints stay, and training goes on."""
        start = time.monotonic()
        draft = Draft(self._root, self._moment.n, self._moment.step, self._moment.generation)
        parts: list[Part] = []
        failure = ""
        try:
            self._watch("checkpoint")
            parts.append(draft.write(f"seat-{self._seat}", slot))
            if self._seat == 0:
                parts.append(draft.write("model", protected.replicated()))
        except (StorageError, OSError) as error:
            failure = str(error)
        everyone = [
            msgspec.msgpack.decode(b, type=tuple[str, list[Part]])
            for b in self._groups.gather_bytes(msgspec.msgpack.encode((failure, parts)))
        ]
        failures = [f"rank {r}: {said}" for r, (said, _) in enumerate(everyone) if said]
        if self._seat == 0:
            self._finish(draft, [p for _, ps in everyone for p in ps], failures, start)

    def _finish(self, draft: Draft, parts: list[Part], failures: list[str], start: float) -> None:
        moment = self._moment
        try:
            if failures:
                raise StorageError("; ".join(failures))
            path = str(draft.complete(parts, self._job, self._groups.world).path)
            prune(self._root, KEEP)
        except (StorageError, OSError) as error:
            draft.discard()
            self._timeline.emit(
                events.CheckpointFailed(
                    t_ns=self._timeline.now_ns(), n=moment.n, step=moment.step,
                    path=str(draft.final), error=str(error),
                )
            )  # fmt: skip
            return
        self._send(wire.Checkpointed(n=moment.n, step=moment.step, path=path))
        self._timeline.emit(
            events.CheckpointSaved(
                t_ns=self._timeline.now_ns(), n=moment.n, step=moment.step, path=path,
                size_bytes=sum(p.size_bytes for p in parts), seconds=time.monotonic() - start,
            )
        )  # fmt: skip


def load_slot(path: str, seat: int) -> bytes:
    """This seat's slot. Raises CorruptionError, StorageError."""
    slot = Checkpoint.open(Path(path)).load(f"seat-{seat}")
    if not isinstance(slot, bytes):
        raise CorruptionError(f"{path}/seat-{seat} does not hold a slot; nothing was taken over")
    return slot


def load_model(path: str) -> Any:
    """The replicated state. Raises CorruptionError, StorageError."""
    return Checkpoint.open(Path(path)).load("model")
