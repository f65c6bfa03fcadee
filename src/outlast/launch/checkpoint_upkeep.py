"""Checkpoint upkeep during a run: deletion of old checkpoints, drain to durable storage."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast import events
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.upkeep import upkeep_process
from outlast.checkpoint.upkeep.checkpoint_copy import CopyResult
from outlast.checkpoint.upkeep.durable_targets import DurableTarget
from outlast.checkpoint.upkeep.retention_policy import Keep, RetentionVerdict
from outlast.controller.inputs import EndRun
from outlast.launch.run_display import DisplayRecord

_SLACK_S = 1.0


class CheckpointUpkeep:
    """Threads that copy and prune checkpoints at low priority during one launcher's life.

    A failure never ends the run: it is noted, and the work is retried after the next checkpoint.
    """

    def __init__(
        self,
        root: Path,
        keep: Keep,
        durable: Sequence[DurableTarget],
        record: DisplayRecord,
        barred: Callable[[SavePoint], bool] = lambda _: False,
    ) -> None:
        self._local = Folder(root)
        self._record = record
        self._closed = False
        self._threads = upkeep_process.UpkeepThreads(self._local, keep, durable, self, barred)

    def committed(self) -> None:
        """Report a new checkpoint; returns immediately."""
        self._threads.committed()

    async def close(
        self, timeout_s: float, give_up: asyncio.Future[EndRun], *, done: bool = False
    ) -> None:
        """Do a last pass after the last save, until `timeout_s` or `give_up`.

        `done`: the run ended as planned; its newest checkpoint is copied to every target. Targets
        that still lack a checkpoint are noted.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            self._threads.finish(timeout_s, newest=done)
            with contextlib.suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(ended.set_result, None)

        threading.Thread(target=finish, name="upkeep", daemon=True).start()
        await asyncio.wait(
            {ended, give_up}, timeout=timeout_s + _SLACK_S, return_when=asyncio.FIRST_COMPLETED
        )
        self._closed = True
        for where in self._threads.behind:
            self._record.note(
                f"{where} lacks some checkpoints: they are in {self._local.where}; the"
                " next launcher of this run, or `outlast ckpt copy`, copies them"
            )

    # --- called by the threads ---

    def deleted(self, verdict: RetentionVerdict) -> None:
        """Note a deleted checkpoint."""
        if not self._closed:
            text = f"checkpoint {verdict.place.directory} was deleted: {verdict.why}"
            self._record.emit(
                events.Note(t_ns=self._record.now_ns(), worker="", seat=-1, text=text, level="info")
            )

    def not_deleted(self, error: str) -> None:
        """Note a failed deletion; it is retried."""
        if not self._closed:
            self._record.note(f"old checkpoints could not be deleted: {error}")

    def copied(self, copied: CopyResult, where: str) -> None:
        """Note a copy to durable storage."""
        if self._closed:
            return
        place = copied.place
        self._record.emit(
            events.Drained(
                t_ns=self._record.now_ns(),
                n=place.n,
                step=place.step,
                where=f"{where}/{place.directory}",
                size_bytes=copied.sent_bytes + copied.present_bytes,
                seconds=copied.seconds,
            )
        )

    def not_copied(self, error: str, where: str) -> None:
        """Note a failed copy; it is retried."""
        if not self._closed:
            self._record.emit(
                events.DrainFailed(t_ns=self._record.now_ns(), where=where, error=error)
            )
