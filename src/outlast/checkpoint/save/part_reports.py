"""Reports of ranks about their parts of a save, and rank 0's verdict on parts that cannot come.

Rank 0's keeper commits once all parts are in its directory. A part that cannot appear there (the
rank's mount is gone, its call gave another step) would be missed only at the deadline. Each rank
therefore posts its report in the store of the process group; while its save is open, rank 0 reads
the reports of the others:

| report of a rank                    | rank 0                                                    |
|-------------------------------------|-----------------------------------------------------------|
| none                                | waits until the deadline; `wait` names the rank           |
| "begun", with the same step         | the same                                                  |
| any, with another step              | its save fails at once, and that rank's as well           |
| "failed"                            | its save fails at once, with the reason                   |
| "written", and in the directory     | the keeper commits                                        |
| "written", and not in the directory | its save fails after UNSEEN_S: they see two directories   |

A failure reaches the keeper as the failure file of that rank (part_files.py).

Under `outlast run` a phase that saves may be redone, on some ranks after a save and on others
before it, and a rank may be replaced. There all ranks agree on each call of `save` before it begins
(`SaveCall`), so that a rank that fails, gives another step, or has joined since is named on all at
once. Posted is only "failed": notes go through the controller, from each rank to all.
"""

from __future__ import annotations

import atexit
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from outlast.checkpoint.format.manifests import SavePoint, manifest_name
from outlast.checkpoint.keeper.keeper_frames import Outcome
from outlast.checkpoint.keeper.part_files import failure_path
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import CorruptionError, OutlastError, StorageError, UsageError

UNSEEN_S = 75.0  # NFS shows a directory's new names after 60 s at most, by its defaults
_PAUSE_S, _PAUSE_MAX_S = 0.05, 0.5
_END_S = 10.0  # for the last round of the thread
_OPEN_MAX = 16  # saves that are watched at once; as many reports a rank are in the store
_NAMED_MAX = 8
PlacedSave: TypeAlias = tuple[SavePoint, str, str]
Progress: TypeAlias = Callable[[], tuple[Outcome | None, bool]]


class PartReport(msgspec.Struct, frozen=True, array_like=True):
    """One rank's report of one call of `save`; the number of the call is equal on all ranks."""

    call: int
    step: int
    state: Literal["begun", "written", "failed"]
    host: str = ""
    why: str = ""


class SavePlacement(msgspec.Struct, frozen=True, array_like=True):
    """One rank's place of a save under `outlast run`; `failure`: why it has none."""

    placed: PlacedSave | None
    failure: str = ""


class SaveCall(msgspec.Struct, frozen=True, array_like=True):
    """One rank's statement at the begin of a call of `save` under `outlast run`.

    `has_claim`: it has saved before. `failure`: why it cannot save now.
    """

    call: int
    step: int
    has_claim: bool = False
    failure: str = ""


def agreed_call(calls: Sequence[SaveCall]) -> int:
    """Return the number of a call, which no rank has used yet. `calls`: of all ranks.

    Raises StorageError where a rank cannot save, UsageError where ranks do not save together.
    """
    if failures := [f"rank {r}: {each.failure}" for r, each in enumerate(calls) if each.failure]:
        raise StorageError(f"{'; '.join(failures)}; nothing was saved")
    for rank, each in enumerate(calls):
        if each.step != calls[0].step:
            why = describe_steps(rank, each.step, 0, calls[0].step)
            raise UsageError(f"{why}; nothing was saved")
    joined = [rank for rank, each in enumerate(calls) if not each.has_claim]
    if joined and len(joined) < len(calls):
        named = ", ".join(map(str, joined[:_NAMED_MAX])) + ("..." if joined[_NAMED_MAX:] else "")
        raise UsageError(
            f"rank {named} was replaced since this Checkpointer's first save, and a Checkpointer"
            " cannot follow a replacement; nothing was saved, earlier checkpoints are untouched;"
            " under outlast run let the run save: --checkpoint-every"
        )
    return max(each.call for each in calls)


@dataclass
class WatchedSave:
    """A save whose reports are read. `progress` as SaveEngine's.

    `written_s`: when a rank's report of "written" was first read. `judged`: ranks whose part cannot
    come; on other ranks 0, once its step was compared.
    """

    call: int
    place: SavePoint
    progress: Progress
    due_s: float
    is_posted: bool = False
    written_s: dict[int, float] = field(default_factory=dict)
    judged: set[int] = field(default_factory=set)

    def judge(self, rank: int, report: PartReport | None, now_s: float, unseen_s: float) -> str:
        """Return why the part of `rank` cannot come, "" where it may. Rank 0's side; pure.

        A part that was reported as written may be in the directory after all: the caller looks.
        """
        if report is None or report.call != self.call:
            return ""
        if report.state == "failed":
            return report.why
        if report.step != self.place.step:
            return describe_steps(rank, report.step, 0, self.place.step)
        if report.state == "written":
            since_s = self.written_s.setdefault(rank, now_s)
            if now_s - since_s > unseen_s:
                return (
                    f"it reported {now_s - since_s:.0f} s ago that its part is written on"
                    f" {report.host}, and {manifest_name(rank)} is not in this directory: the two"
                    " ranks see different directories (a missing mount, another host's own);"
                    " let all ranks save to one shared directory"
                )
        return ""


def describe_steps(rank: int, step: int, other: int, others: int) -> str:
    """Return the message for two ranks that gave one save different steps."""
    return (
        f"rank {rank} gave this save step {step}, rank {other} step {others}: they call save at"
        " different steps; let all ranks save the same step, in the same order"
    )


class PartReports:
    """Posts this rank's reports and reads those of the others, in a thread while saves are open.

    `save_s`: deadline of a save. A single rank posts nothing.
    """

    def __init__(self, ranks: RankGroup, root: Folder, save_s: float) -> None:
        self._ranks, self._root, self._save_s = ranks, root, save_s
        self._notes = ranks.notes if ranks.world > 1 else None
        self._pending: Literal["", "call", "place"] = ""  # next agreement of the call under way
        self._call = 0
        self._unseen_s = min(UNSEEN_S, 0.9 * save_s)
        self._open: list[WatchedSave] = []
        self._failures: list[str] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def begin(self, call: int) -> Iterator[None]:
        """Delimit one call of `save`; an error that ends it is posted."""
        self._call, self._pending = call, "call" if self._ranks.is_replaceable else ""
        try:
            yield
        except BaseException as error:  # Ctrl-C as well: rank 0 must not wait
            why = str(error) or type(error).__name__
            if self._pending and isinstance(error, Exception):
                with suppress(OutlastError):  # which names this rank
                    if self._pending == "call":
                        self._agree(SaveCall(call, -1, failure=why))
                    else:
                        self._exchange_places(SavePlacement(None, why))
            self._post(self._call, -1, "failed", why)
            raise

    def begun(self, call: int, step: int, *, has_claim: bool) -> int:
        """Post the step that this rank gave; return the number of the call.

        Under `outlast run` raises as `agreed_call` does, on all ranks.
        """
        if self._pending:
            self._call = self._agree(SaveCall(call, step, has_claim))
            self._pending = "place"
            return self._call
        self._post(call, step, "begun")
        return call

    def _agree(self, mine: SaveCall) -> int:
        message, self._pending = msgspec.msgpack.encode(mine), ""
        answers = self._ranks.exchange(message)
        return agreed_call([msgspec.msgpack.decode(each, type=SaveCall) for each in answers])

    def placed(self, placed: PlacedSave) -> PlacedSave:
        """Return place, parent and base of the save: under `outlast run` those of rank 0."""
        if not self._ranks.is_replaceable:
            return placed
        return self._exchange_places(SavePlacement(placed))

    def _exchange_places(self, mine: SavePlacement) -> PlacedSave:
        message, self._pending = msgspec.msgpack.encode(mine), ""
        answers = self._ranks.exchange(message)
        places = [msgspec.msgpack.decode(each, type=SavePlacement) for each in answers]
        failures = [f"rank {r}: {each.failure}" for r, each in enumerate(places) if not each.placed]
        if failures or places[0].placed is None:
            raise StorageError(f"{'; '.join(failures)}; nothing was saved")
        return places[0].placed

    def refuse(self, place: SavePoint, why: str) -> None:
        """Announce in the directory that this part will never come, where there is no store."""
        if self._ranks.rank == 0 or self._notes:
            return  # rank 0's keeper was not ordered to wait; or the report tells it
        self._announce(place, self._ranks.rank, why)

    def watch(self, call: int, place: SavePoint, progress: Progress) -> None:
        """Post the outcome of this rank's save when it ends, and read the reports meanwhile."""
        if not self._notes:
            return
        with self._change:
            self._open = self._open[1 - _OPEN_MAX :]
            self._open.append(WatchedSave(call, place, progress, time.monotonic() + self._save_s))
            self._change.notify_all()
        if not self._thread:
            self._thread = threading.Thread(target=self._run, name="part reports", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside the store's code must not meet the end

    def describe_missing(self) -> list[str]:
        """Return for each save of rank 0 that lacks only others' parts what these reported."""
        with self._change:
            open_saves = [s for s in self._open if s.progress()[1] and not self._ranks.rank]
        texts: list[str] = []
        for save in open_saves:
            present = self._files(save) or ()
            missing = [
                f"rank {rank} ({self._describe(save, rank)})"
                for rank in range(1, self._ranks.world)
                if manifest_name(rank) not in present
            ]
            if missing:
                more = f" and {len(missing) - _NAMED_MAX} more" if missing[_NAMED_MAX:] else ""
                parts = ", ".join(missing[:_NAMED_MAX]) + more
                texts.append(f"the save of step {save.place.step} lacks the parts of {parts}")
        return texts

    def _describe(self, save: WatchedSave, rank: int) -> str:
        report = self._read(save, rank)
        if report is None or report.call != save.call:
            return "still writes" if self._ranks.is_replaceable else "has not called save"
        if report.state == "failed":
            return f"failed: {report.why}"
        if report.step != save.place.step:
            return f"gave step {report.step}"
        return "still writes" if report.state == "begun" else f"wrote it on {report.host}"

    def take_failures(self) -> list[str]:
        """Return the failures that only other ranks' reports show, since the last call."""
        with self._change:
            failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Stop reading; the last reports have been posted."""
        if self._ranks.is_forked:
            return  # called at the exit of a process that the script has forked
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread:
            self._thread.join(_END_S)
            atexit.unregister(self.close)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while True:
            with self._change:
                self._change.wait_for(lambda: self._open or self._closed)
                saves, closed = list(self._open), self._closed
            begin_s = time.monotonic()
            ended = [save for save in saves if self._advance(save)]
            took_s = time.monotonic() - begin_s
            with self._change:
                self._open = [save for save in self._open if save not in ended]
                if closed:
                    return
                pause_s = _PAUSE_S if ended else min(2 * pause_s, _PAUSE_MAX_S)
                if self._open:  # many ranks make a round dear: a tenth of the time is spent on it
                    self._change.wait_for(lambda: self._closed, max(pause_s, 10 * took_s))

    def _advance(self, save: WatchedSave) -> bool:
        """Read the reports of one save; return whether there is nothing more to learn."""
        outcome, _ = save.progress()
        if outcome and not save.is_posted:
            failed = outcome.kind in ("failed", "skipped")
            state = "failed" if failed else "written"
            self._post(save.call, save.place.step, state, outcome.error if failed else "")
            save.is_posted = True
        late = time.monotonic() > save.due_s
        if self._ranks.rank == 0:
            if outcome is None:
                self._judge_others(save)
            return late or outcome is not None
        return late or (self._compare_with_first(save) and outcome is not None)

    def _judge_others(self, save: WatchedSave) -> None:
        present: Collection[str] | None = None
        for rank in range(1, self._ranks.world):
            if rank in save.judged:
                continue
            report, now_s = self._read(save, rank), time.monotonic()
            why = save.judge(rank, report, now_s, self._unseen_s)
            if why and report is not None and report.state == "written":
                present = self._files(save) if present is None else present
                if present is None:
                    return  # the next round looks again
                why = "" if manifest_name(rank) in present else why
            if why:
                self._announce(save.place, rank, why)
                save.judged.add(rank)

    def _compare_with_first(self, save: WatchedSave) -> bool:
        """Compare this rank's step with rank 0's; return whether that has been done."""
        if 0 in save.judged or self._ranks.is_replaceable:
            return True
        report = self._read(save, 0)
        if report is None or report.call != save.call:
            return False
        save.judged.add(0)
        # A failed commit has a step: rank 0 raises it, and others would hear of it by chance.
        why = f"rank 0: {report.why}" if report.state == "failed" and report.step < 0 else ""
        if not why and report.step != save.place.step:
            why = describe_steps(self._ranks.rank, save.place.step, 0, report.step)
        if why:
            with self._change:
                self._failures.append(f"the save of step {save.place.step} failed: {why}")
        return True

    # --- store and directory -------------------------------------------------------------------

    def _post(
        self, call: int, step: int, state: Literal["begun", "written", "failed"], why: str = ""
    ) -> None:
        if self._notes and (state == "failed" or not self._ranks.is_replaceable):
            report = PartReport(call, step, state, socket.gethostname(), why)
            self._notes.post(call % _OPEN_MAX, msgspec.json.encode(report))

    def _read(self, save: WatchedSave, rank: int) -> PartReport | None:
        data = self._notes.posted(save.call % _OPEN_MAX, rank) if self._notes else b""
        return msgspec.json.decode(data, type=PartReport) if data else None

    def _announce(self, place: SavePoint, rank: int, why: str) -> None:
        """Write the failure file of a rank, which fails the save on rank 0."""
        name = failure_path(Path(manifest_name(rank))).name
        with suppress(StorageError, CorruptionError):  # then the save fails by its deadline
            self._root.create(place.directory, name, why.encode())

    def _files(self, save: WatchedSave) -> Collection[str] | None:
        """Return the names in the save's directory; None where it cannot be listed now."""
        with suppress(StorageError, CorruptionError):
            return self._root.files(save.place.directory)
        return None
