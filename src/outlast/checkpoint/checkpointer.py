"""Checkpoints for a training script of any launcher."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import xxhash
from torch import distributed as dist

from outlast.checkpoint import state_content as rank_own
from outlast.checkpoint.format.manifests import SavePoint, step_count
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.load.checkpoint_load import CheckpointLoad, Restored
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.save import agreed_plan, save_request
from outlast.checkpoint.save.arena_slots import collector_paused
from outlast.checkpoint.save.part_reports import PartReports
from outlast.checkpoint.save.save_driver import OutcomeQueue, SaveDriver, describe_failure
from outlast.checkpoint.script_state import (
    ScriptState,
    check_complete,
    expected_state,
    script_origin,
)
from outlast.checkpoint.state_content import NameMatching, flatten_state
from outlast.checkpoint.stores.chunk_reader import ANSWER_S, IoTimeout
from outlast.checkpoint.stores.directory_claim import Address, Claim, Claimer, LoadOrigin, Tiers
from outlast.checkpoint.stores.directory_ownership import wait_for_keeper
from outlast.checkpoint.upkeep.upkeep_client import UpkeepClient
from outlast.errors import OutlastError, StorageError, UsageError

_OWN_BYTES = 64 << 10  # estimated size of a rank's own part
_NAMING_S = 10.0  # `wait` names the ranks that it waits for after this time


class CheckpointWarning(UserWarning):
    """A save failed or was passed over, or found an older file damaged; training is untouched."""


class _Begun(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer at construction. `silent`: errors of targets that do not answer."""

    attempt: str = ""
    error: str = ""
    silent: list[str] = []


class Checkpointer:
    """Saves and loads the state of a training script under the directory `root`.

    All ranks of `group` (default: the default group of torch.distributed) construct it together and
    call `save` and `load` together. A save blocks for one copy of the state in memory; a separate
    process writes that copy and finishes even if this process dies.

    `keep`: retention policy ("last=3,every=1000"; as `outlast run --keep`); empty keeps all.
    `durable`: targets to which checkpoints are copied, and from which `load` reads, too
    ("s3://bucket/run", or "/mirror/run every=6h keep=last=2 rate=200MB/s"; as `--durable`). `job`:
    a name. Checkpoints of another job are refused, and so is a second process that saves to `root`.
    A run that loads an older checkpoint begins a line: its saves are newer than all that were
    there. A run that loads none although there are some is refused without `branch=True`.
    `complete=False`: the state may lack parts that the next step depends on (weights alone, say).
    `on_failure`: report a failed save as a warning at the next `save` or `wait`, or raise
    StorageError there. `arenas`: number of saves in flight, each with this rank's part of the state
    in memory; `when_busy`: wait for one to end, or skip the save with a warning. `save_s`: deadline
    for a save to become durable, and for ranks that wait for each other. `answer_s`: time without
    progress after which reading a file system fails the load. `on_unreadable`: policy of a load for
    a newer checkpoint that is undamaged but unreadable (an I/O error, missing permissions): raise
    StorageError, or load an older one.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        group: dist.ProcessGroup | None = None,
        job: str = "",
        complete: bool = True,
        branch: bool = False,
        on_failure: save_request.OnFailure = "warn",
        keep: str = "",
        durable: Address | Sequence[Address] = (),
        arenas: int = 2,
        when_busy: save_request.WhenBusy = "wait",
        save_s: float = 1800.0,
        answer_s: float = ANSWER_S,
        on_unreadable: save_request.OnUnreadable = "raise",
    ) -> None:
        save_request.check_options(save_s, answer_s, arenas, on_failure, when_busy, on_unreadable)
        self._tiers = Tiers(root, keep, durable, answer_s)
        self._store = self._tiers.root
        self._ranks = RankGroup(group, save_s)
        self._settings = save_request.SaveSettings(
            root=self._store.root,
            rank=self._ranks.rank,
            world=self._ranks.world,
            job=job,
            save_s=save_s,
            arenas=arenas,
            when_busy=when_busy,
        )
        self._complete = complete
        self._branch = branch
        self._answer_s = answer_s
        self._older = on_unreadable == "older"
        self._on_failure: save_request.OnFailure = on_failure
        self._attempt = self._begin()
        self._attempts = 0
        self._loaded: LoadOrigin | None = None
        self._claim: Claim | None = None
        self._driver: SaveDriver | None = None
        self._upkeep: UpkeepClient | None = None
        self._closed = False
        self._parts: frozenset[str] = frozenset()
        self._outcomes = OutcomeQueue()
        self._reports = PartReports(self._ranks, self._store, save_s)

    def _begin(self) -> str:
        """Return the prefix of the names of all ranks' attempts.

        Raises UsageError on all ranks where rank 0 cannot save with these settings.
        """
        statement = _Begun()
        if self._ranks.rank == 0:
            try:
                silent = self._tiers.check(self._settings.job)
                statement = _Begun(attempt=secrets.token_hex(6), silent=silent)
            except OutlastError as error:
                statement = _Begun(error=f"{error}; nothing was started")
        answer = self._ranks.exchange(msgspec.msgpack.encode(statement))[0]
        begun = msgspec.msgpack.decode(answer, type=_Begun)
        if begun.error:
            raise UsageError(begun.error)
        for each in statement.silent:
            warnings.warn(f"{each}; it is tried again", CheckpointWarning, stacklevel=3)
        return begun.attempt

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A failed save must not hide the script's exception.
        self._close(self._on_failure if kind is None else "warn", in_peace=kind is None)

    def prepare(self, state: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Allocate the memory for saves of `state` in the background.

        The first save then blocks about as long as later ones. All ranks call it together, after
        `load`; it may come before the optimizers' first step. Raises as `save` does, but for a lack
        of memory, which the first save raises.
        """
        with self._ranks.together("prepare"):
            self._check_open()
            script_state = ScriptState(state, own)
            self._check_parts(script_state)
            driver = self._driver or self._start(self._claim or self._make_claim())
            content = flatten_state(script_state)
            tensors = content.tensors | expected_state(script_state)
            mine = xxhash.xxh3_128_digest(repr([(n, t.shape) for n, t in tensors.items()]).encode())
            alike = self._ranks.exchange(mine)
            replicas = [rank for rank, each in enumerate(alike) if each == mine]
            driver.engine.reserve(tensors, len(content.shared) + _OWN_BYTES, replicas)

    def save(
        self, step: int, state: Mapping[str, Any], own: Mapping[str, Any] | None = None
    ) -> int:
        """Save `state` after `step` steps; return the number of the save.

        `own`: state of this rank alone (a loader's position), beside random generators, which are
        always saved. When this returns, the state may change again. Raises UsageError for a state
        that cannot be saved, is not complete, or lacks parts of earlier saves; StorageError when
        there is no memory for a copy, or when an earlier save failed and `on_failure` is "raise":
        then this save was not begun.
        """
        self._attempts += 1  # on all ranks, whatever becomes of it on this one
        reports = self._reports.begin(self._attempts)
        with self._ranks.together("save"), reports, collector_paused():
            self._check_open()
            step = step_count(step)
            self._tell(self._on_failure)
            self._attempts = self._reports.begun(self._attempts, step, has_claim=bool(self._claim))
            claim = self._claim or self._make_claim()
            attempt = f"{self._attempt}{self._attempts}"
            place, parent, base = self._reports.placed(claim.lineage.go_on(step, step, attempt))
            try:
                return self._save(claim, place, parent, base, ScriptState(state, own))
            except Exception as error:  # raised again: this informs the other ranks
                self._reports.refuse(place, str(error))
                raise

    def _make_claim(self) -> Claim:
        claiming = Claimer(
            self._store,
            self._tiers.sources(),
            self._ranks,
            job=self._settings.job,
            save_s=self._settings.save_s,
            answer_s=self._answer_s,
        )
        self._claim = claiming.make(self._loaded, self._branch)
        return self._claim

    def _save(
        self, claim: Claim, place: SavePoint, parent: str, base: str, state: ScriptState
    ) -> int:
        try:
            driver = self._driver or self._start(claim)
            self._check_parts(state)
            content = flatten_state(state)
            own_bytes = rank_own.capture_rank_state(state, content.rest, self._ranks.world)
        except Exception as error:  # raised again, after informing the other ranks
            if not self._parts:  # first save: all other ranks wait for this one
                agreed_plan.refuse(str(error), self._ranks.exchange)
            raise
        if self._upkeep:
            self._upkeep.saving(driver.keeper.pid)
        if claim.owned:
            claim.owned.keeper_is(driver.keeper.pid)
        save = driver.save(
            save_request.SaveRequest(
                place,
                content.tensors,
                shared=content.shared,
                own=own_bytes,
                origin=script_origin(),
                parent=parent,
                base=base,
                rank_specific=rank_own.rank_buffers(state),
                values=content.digests,
            )
        )
        self._parts = frozenset(state.names())
        self._reports.watch(self._attempts, place, lambda: driver.engine.progress(save))
        return save

    def load(
        self,
        state: Mapping[str, Any],
        own: Mapping[str, Any] | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
        cast: bool = False,
        skip: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        share: bool | None = None,
    ) -> Restored | None:
        """Load the newest checkpoint that every rank can read, or that of `step`.

        Returns None when there is no checkpoint. `strict=False`: names that only one side has are
        left out, and listed in the result. `cast`: floating-point tensors may have another dtype
        than in the checkpoint. `skip`: names that stay unchanged ("model.head": all below it, and
        their optimizer state). `rename`: names of the checkpoint, and their names in `state`.
        `share`: let ranks pass each other chunks that several of them need, so that each chunk is
        read once; None: only where ranks run on several hosts, or the source is reached over a
        network. The same on all ranks.

        Every byte is verified. Raises MismatchError with all differences in names, shapes and
        dtypes, before anything is changed; CorruptionError when there are checkpoints, but all are
        damaged; StorageError when the directory cannot be read.
        """
        with self._ranks.together("load"):
            loading = CheckpointLoad(
                self._tiers.sources(),
                self._ranks,
                ScriptState(state, own),
                job=self._settings.job,
                complete=self._complete,
                older=self._older,
                matching=NameMatching(strict, cast, tuple(skip), dict(rename or {})),
                share=share,
            )
            if self._ranks.rank == 0:
                wait_for_keeper(self._store.root, self._settings.save_s, IoTimeout(self._answer_s))
            restored = loading.run(None if step is None else step_count(step))
            if self._driver:
                self._driver.engine.read_back_next()
            if restored:
                self._loaded = LoadOrigin(restored.place, loading.base)
            if restored and self._claim:
                self._claim.lineage.loaded(restored.place)
            if restored is None and loading.has_lost_commit:
                warnings.warn(
                    f"nothing was loaded: {loading.begun}", CheckpointWarning, stacklevel=3
                )
            if restored and loading.mendable and self._ranks.rank == 0:
                self._look_after().mend(restored.place.directory)
            return restored

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save of this rank has ended.

        Ended means committed on rank 0, written on other ranks. Reports failures as `save` does;
        raises StorageError when a save is still in progress after `timeout_s` (default: `save_s`).
        Rank 0 warns after some seconds in which it has waited for other ranks alone, and names
        them. A rank that has failed, or gave another step, fails the save at once.
        """
        self._ranks.refuse_fork()
        if self._driver:
            limit_s = self._settings.save_s if timeout_s is None else timeout_s
            late = self._driver.wait(min(limit_s, _NAMING_S))
            if late and limit_s > _NAMING_S:
                self._report(self._reports.describe_missing(), "warn")
                late = self._driver.wait(limit_s - _NAMING_S)
            if late:
                raise StorageError("; ".join([*late, *self._reports.describe_missing()]))
            self._tell(self._on_failure)

    def close(self) -> None:
        """Wait for saves to end, then end their process. Reports failures as `save` does."""
        self._close(self._on_failure, in_peace=True)

    def _close(self, on_failure: save_request.OnFailure, *, in_peace: bool) -> None:
        if self._ranks.is_forked:
            return  # the saves and their process are the parent's
        driver, self._driver, self._closed = self._driver, None, True
        failures: list[str] = []
        if driver:
            try:
                driver.close(self._settings.save_s)
            except StorageError as error:
                failures.append(str(error))
        self._reports.close()  # its last round may find a failure
        failures += self._take_failures()
        if self._claim and self._claim.owned:
            self._claim.owned.close()
        upkeep, self._upkeep = self._upkeep, None
        if upkeep and in_peace:
            failures += upkeep.close(self._settings.save_s)
        elif upkeep:
            upkeep.let_go()  # it finishes alone, without delaying the exception
        self._report(failures, on_failure)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed; nothing was saved")

    def _check_parts(self, state: ScriptState) -> None:
        if self._complete:
            check_complete(state)
        missing = sorted(self._parts.difference(state.names()))
        if missing:
            raise UsageError(
                f"earlier saves had {', '.join(missing)} and this one has not: a run could not"
                " continue from it; nothing was saved; give the same parts at every save"
            )

    def _start(self, claim: Claim) -> SaveDriver:
        fds = claim.owned.fds if claim.owned else ()
        keeper = KeeperClient.start(f"rank {self._ranks.rank}", fds)
        settings = replace(self._settings, owner=claim.token)
        self._driver = SaveDriver(settings, self._ranks.exchange, keeper, self._outcomes)
        if self._ranks.rank == 0 and not self._tiers.plain:
            self._look_after()
        return self._driver

    def _look_after(self) -> UpkeepClient:
        """Return the client of the upkeep process; start the process if there is none."""
        if self._upkeep is None:
            setup = self._tiers.setup(self._settings.save_s)
            self._upkeep = UpkeepClient(setup, f"rank {self._ranks.rank}")
        return self._upkeep

    def _tell(self, on_failure: save_request.OnFailure) -> None:
        if self._driver:
            self._driver.poll()
            failures = self._take_failures()
            self._report(failures + (self._upkeep.failures() if self._upkeep else []), on_failure)

    def _take_failures(self) -> list[str]:
        damage, ended = self._outcomes.take()
        for text in damage:
            warnings.warn(text, CheckpointWarning, stacklevel=4)
        if self._upkeep and any(outcome.kind == "committed" for outcome in ended):
            self._upkeep.committed()
        return [
            describe_failure(outcome, self._ranks.rank)
            for outcome in ended
            if outcome.kind in ("failed", "skipped")
        ] + self._reports.take_failures()

    def _report(self, failures: list[str], on_failure: save_request.OnFailure) -> None:
        if failures and on_failure == "raise":
            raise StorageError("; ".join(failures))
        for failure in failures:
            warnings.warn(failure, CheckpointWarning, stacklevel=4)
