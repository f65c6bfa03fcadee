"""Load of the newest checkpoint that all ranks can read, by agreement at every attempt.

Rank 0 lists the checkpoints. One that any rank finds damaged is passed over by all, with a note;
one that does not fit raises on all, with every difference, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.load.chunk_relay import ChunkRelay
from outlast.checkpoint.load.load_preparation import (
    OLDER,
    Candidate,
    LoadRequest,
    agreed_relay,
    candidates,
    check_alike,
    rename_checkpoint,
)
from outlast.checkpoint.load.state_fitting import SavedState, StateFitting
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.rank_group import RankGroup
from outlast.checkpoint.save.agreed_plan import brief
from outlast.checkpoint.save.shard_plan import dtype_name
from outlast.checkpoint.script_state import ScriptState
from outlast.checkpoint.state_content import (
    EXACT,
    NameMatching,
    is_within,
    rank_state_differences,
    restore_rank_state,
)
from outlast.checkpoint.stores.catalog import Checkpoint, open_checkpoint
from outlast.checkpoint.stores.store_interfaces import StoreSource, hold_checkpoint
from outlast.errors import CorruptionError, MismatchError, StalledError, StorageError, UsageError

T = TypeVar("T")
_LISTED_MAX = 200
_REPAIRS_LISTED_MAX = 8
_FILLED_IN_PART = "the state was filled in part and must not be used"


class Restored(NamedTuple):
    """Origin of a restored state.

    `notes`: checkpoints passed over, repairs, inexact parts. `missing`: names of the state that the
    checkpoint lacks, unchanged; `unexpected`: names of the checkpoint that the state lacks; both on
    any rank, and only with `strict=False`.
    """

    step: int
    place: SavePoint
    notes: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class _LoadFindings(msgspec.Struct, frozen=True, array_like=True):
    """Findings of one rank.

    `unread`: error of reading an apparently undamaged checkpoint; `spare`: names without a place
    here; `repairs`: chunks from other sources; `missing` and `unexpected`: as in Restored;
    `infinite`: tensors whose new type was too small for a value; `commit`: digest of the commit
    record that it has read.
    """

    damage: str = ""
    unread: str = ""
    stalled: str = ""
    differences: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    infinite: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    commit: str = ""


class _LoadTurn(msgspec.Struct, frozen=True, array_like=True):
    """One rank's message before each attempt; the candidate is rank 0's."""

    candidate: Candidate
    request: LoadRequest


class _PreparedLoad(NamedTuple):
    reader: CheckpointReader
    fitting: StateFitting
    origin: Mapping[str, str]
    own: dict[str, Any] | None


class CheckpointLoad:
    """One load, by all ranks together."""

    def __init__(
        self,
        sources: Sequence[StoreSource],
        ranks: RankGroup,
        state: ScriptState,
        *,
        job: str,
        complete: bool,
        older: bool = False,
        matching: NameMatching = EXACT,
        share: bool | None = None,
    ) -> None:
        """Prepare a load.

        `sources`: stores to load from; chunks damaged in one are read from another. `older`: pass
        over unreadable, undamaged checkpoints as well. `share`: as in `agreed_relay`.
        """
        self._matching, self._share = matching, share
        strict, cast = bool(matching.strict), bool(matching.cast)
        self._request = LoadRequest(None, strict, cast, matching.skip, dict(matching.rename))
        self._skipped: list[tuple[str, ...]] = []  # names that each rank skips
        self._missing: set[str] = set()
        self._unexpected: set[str] = set()
        self._sources, self._ranks, self._state, self._older = sources, ranks, state, older
        self._job, self._complete = job, complete
        self._repairs: list[str] = []
        self._repaired = False
        self.mendable = False  # the restored checkpoint is damaged in the first source
        self._unread: tuple[str, str] = ("", "")  # a checkpoint, and why it cannot be read
        self.notes: list[str] = []
        self.begun, self.has_lost_commit = "", False  # newer saves without a commit record
        self.base = ""  # base of the restored checkpoint's line

    def run(self, step: int | None) -> Restored | None:
        """Restore the newest checkpoint, or that of `step`; return None when there is none.

        Raises MismatchError, UsageError, CorruptionError or StorageError: the same on all ranks.
        """
        remaining: Iterator[Candidate] = iter(())
        self._request = msgspec.structs.replace(self._request, step=step)
        if self._ranks.rank == 0:
            remaining = candidates(self._sources, self._job, step, older=self._older)
        touched = False
        while (candidate := self._next_candidate(remaining, touched)) is not None:
            place = SavePoint.parse(candidate.directory)
            assert place
            with hold_checkpoint(self._sources[candidate.at], candidate.directory):
                ready = self._prepare(place, candidate.at)
                if ready is None:
                    continue
                touched = True
                if self._read(ready):
                    self.mendable = candidate.spoilt or (candidate.at == 0 and self._repaired)
                    self._finish(ready)
                    self.base = ready.reader.checkpoint.commit.base
                    self.notes += [self.begun] if self.begun else []
                    notes = tuple(dict.fromkeys(self.notes))
                    missing, unexpected = sorted(self._missing), sorted(self._unexpected)
                    return Restored(place.step, place, notes, tuple(missing), tuple(unexpected))
        return None

    def _next_candidate(self, remaining: Iterator[Candidate], touched: bool) -> Candidate | None:
        """Return the next candidate, the same on all ranks; None at the end."""
        mine = next(remaining) if self._ranks.rank == 0 else Candidate()
        answers = self._ranks.exchange(msgspec.msgpack.encode(_LoadTurn(mine, self._request)))
        turns = [msgspec.msgpack.decode(answer, type=_LoadTurn) for answer in answers]
        check_alike([turn.request for turn in turns])
        self._skipped = [turn.request.skip for turn in turns]
        choice = turns[0].candidate
        self.notes += choice.notes
        self.begun = choice.begun or self.begun
        self.has_lost_commit |= choice.lost
        directory, why = self._unread
        if directory not in ("", choice.directory):
            choice = Candidate(unreachable=f"{why}; {OLDER}")
        if choice.unusable:
            raise UsageError(choice.unusable)
        harm = _FILLED_IN_PART if touched else "nothing was touched"
        if choice.unreachable:
            raise StorageError(f"nothing was loaded, and {harm}: {choice.unreachable}")
        if not choice.directory and self.notes:
            where = ", ".join(source.where for source in self._sources)
            raise CorruptionError(
                f"no checkpoint of {where} can be read, and {harm}: " + "; ".join(self.notes)
            )
        if choice.at:
            where = self._sources[choice.at].where
            self.notes.append(f"{choice.directory} is read from {where}: nearer sources lack it")
        return choice if choice.directory else None

    def _prepare(self, place: SavePoint, at: int) -> _PreparedLoad | None:
        """Check all that is possible before a tensor is changed; None if damaged on any rank."""
        source = self._sources[at]
        self._repairs.clear()
        checkpoint, mine = _attempt(lambda: open_checkpoint(source, place))
        relay = agreed_relay(self._ranks, checkpoint, self._share)
        ready = None
        if checkpoint:
            ready, mine = _attempt(lambda: self._open_reader(checkpoint, relay))
        if relay:
            relay.close()
        if ready:
            mine = _LoadFindings(
                differences=tuple(ready.fitting.differences),
                spare=tuple(ready.fitting.spare),
                missing=tuple(ready.fitting.missing),
                unexpected=tuple(ready.fitting.unexpected),
                commit=ready.reader.checkpoint.commit.digest,
            )
        findings = self._exchange(mine)
        if self._is_damaged(place, findings, "nothing was touched"):
            return None
        if len({each.commit for each in findings if each.commit}) > 1:
            digests = ", ".join(f"rank {rank}: {each.commit}" for rank, each in enumerate(findings))
            raise UsageError(
                f"{place.directory} is not the same checkpoint on all ranks (digests of its commit"
                f" record: {digests}); nothing was touched; let all ranks see one directory"
            )
        differences = [line for each in findings for line in each.differences]
        nowhere = set[str].intersection(*(set(each.spare) for each in findings))
        if self._matching.strict:
            differences += [f"{name}: missing here" for name in nowhere]
        if differences:
            raise _mismatch(f"{source.where}/{place.directory}", differences)
        assert ready
        self._missing = {name for each in findings for name in each.missing}
        self._unexpected = {name for each in findings for name in each.unexpected}
        self._unexpected |= set() if self._matching.strict else nowhere
        self.notes += self._inexact_parts(ready)
        return ready

    def _open_reader(self, checkpoint: Checkpoint, relay: ChunkRelay | None) -> _PreparedLoad:
        if relay:
            relay.read_records()
        mirrors = [source for source in self._sources if source is not checkpoint.store]
        reader = CheckpointReader(checkpoint, mirrors, self._repairs.append, relay)
        world, rank = checkpoint.commit.world, self._ranks.rank
        shared = _blob(reader, 0, "shared", by_all=True) or {}
        if "kinds" not in shared:  # imported, or written by another program: tensors only
            shared = {
                "kinds": dict.fromkeys(self._state.modules, "module"),
                "classes": {},
                "rest": {},
            }
        mine = _blob(reader, rank, "own")
        rest = mine["rest"] if mine is not None and world == self._ranks.world else {}
        saved = SavedState(checkpoint.tensors, shared, shared["rest"] | rest)
        matching = self._matching
        saved, origin = rename_checkpoint(saved, matching.rename, self._state)
        fitting = StateFitting(self._state, saved, complete=self._complete, matching=matching)
        fitting.differences += self._skipped_elsewhere(fitting)
        if mine is not None:
            here = {was: name for name, was in origin.items()}
            mine["buffers"] = {here.get(n, n): value for n, value in mine["buffers"].items()}
        if mine is not None and self._complete:
            missing, unexpected = rank_state_differences(self._state, mine, matching)
            if matching.strict:
                fitting.differences += [f"{name}: missing in the checkpoint" for name in missing]
                fitting.differences += [f"{name}: missing here" for name in unexpected]
            else:
                fitting.missing.update(missing)
                fitting.unexpected.update(unexpected)
        return _PreparedLoad(reader, fitting, origin, mine)

    def _skipped_elsewhere(self, fitting: StateFitting) -> Iterator[str]:
        """Yield differences: names that this rank loads and another one skips."""
        loaded = {*self._state.kinds, *fitting.targets}
        for rank, skipped in enumerate(self._skipped):
            for name in set(skipped) - set(self._matching.skip):
                if any(is_within(each, name) and not self._matching.skips(each) for each in loaded):
                    yield (
                        f"{name}: rank {rank} is to skip it, and rank {self._ranks.rank},"
                        " which has it, is to load it"
                    )

    def _inexact_parts(self, ready: _PreparedLoad) -> Iterator[str]:
        if self._matching.skip:
            yield f"left as they were, by skip=: {', '.join(self._matching.skip)}"
        if casts := ready.fitting.casts:
            kinds = sorted(
                {
                    f"{dtype_name(was)} to {dtype_name(ready.fitting.targets[name].dtype)}"
                    for name, was in casts.items()
                }
            )
            yield f"{len(casts)} tensors were cast, by cast= ({', '.join(kinds)})"
        for names, what in (
            (self._missing, "are missing in the checkpoint and were left as they were"),
            (self._unexpected, "are in the checkpoint alone and were left out"),
        ):
            if names:
                yield f"{len(names)} names {what}: {brief(sorted(names))}"
        world = ready.reader.checkpoint.commit.world
        if world == self._ranks.world:
            return
        rank = self._ranks.rank
        what = (
            f"rank {rank} restores those of the saved rank {rank}"
            if ready.own is not None
            else f"rank {rank} keeps its own, since no such rank saved"
        )
        yield (
            f"{world} ranks saved and {self._ranks.world} load: tensors are equal, random"
            f" generators and positions of loaders are each rank's own, and {what}"
        )

    def _read(self, ready: _PreparedLoad) -> bool:
        origin = ready.origin
        targets = {origin[name]: tensor for name, tensor in ready.fitting.targets.items()}
        casts = {origin[name]: was for name, was in ready.fitting.casts.items()}
        infinite, mine = _attempt(lambda: fill_tensors(ready.reader, targets, casts), usage=False)
        if ready.reader.relay:
            ready.reader.relay.close()
        mine = msgspec.structs.replace(mine, infinite=tuple(infinite or ()))
        findings = self._exchange(msgspec.structs.replace(mine, repairs=tuple(self._repairs)))
        if self._is_damaged(ready.reader.checkpoint.place, findings, _FILLED_IN_PART):
            return False
        infinite = sorted({name for each in findings for name in each.infinite})
        if infinite:
            self.notes.append(
                f"values of {brief(infinite)} are infinite now: their type here is too small for"
                " the saved values"
            )
        self._repaired = any(each.repairs for each in findings)
        repairs = [
            f"rank {rank}: {line}" for rank, each in enumerate(findings) for line in each.repairs
        ]
        more = len(repairs) - _REPAIRS_LISTED_MAX
        self.notes += repairs[:_REPAIRS_LISTED_MAX] + ([f"and {more} more"] if more > 0 else [])
        return True

    def _finish(self, ready: _PreparedLoad) -> None:
        ready.fitting.finish()
        if ready.own is None:
            return
        if ready.reader.checkpoint.commit.world != self._ranks.world:
            ready.own["buffers"] = {}  # those among the tensors are used
        own, complete = ready.own, self._complete
        restore_rank_state(self._state, own, process=complete, matching=self._matching)

    def _exchange(self, mine: _LoadFindings) -> list[_LoadFindings]:
        answers = self._ranks.exchange(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(answer, type=_LoadFindings) for answer in answers]

    def _is_damaged(self, place: SavePoint, findings: list[_LoadFindings], state: str) -> bool:
        """Return whether any rank has found damage. StorageError where a source is silent."""
        stalled = [f"rank {rank}: {s.stalled}" for rank, s in enumerate(findings) if s.stalled]
        if stalled:
            raise StorageError(f"nothing was loaded, and {state}: {stalled[0]}")
        unread = [f"rank {rank}: {s.unread}" for rank, s in enumerate(findings) if s.unread]
        if unread and not self._older:
            self._unread = place.directory, unread[0]  # unless another source has it
        damages = [
            f"rank {rank}: {s.damage}" for rank, s in enumerate(findings) if s.damage
        ] + unread
        if damages:
            self.notes.append(f"checkpoint {place.directory} is skipped: {damages[0]}")
        return bool(damages)


def _attempt(do: Callable[[], T], *, usage: bool = True) -> tuple[T | None, _LoadFindings]:
    """Return the result of `do`, and its error as findings. `usage`: UsageErrors, too."""
    try:
        return do(), _LoadFindings()
    except StalledError as error:
        return None, _LoadFindings(stalled=str(error))
    except StorageError as error:
        return None, _LoadFindings(unread=str(error))
    except CorruptionError as error:
        return None, _LoadFindings(damage=str(error))
    except UsageError as error:
        if not usage:
            raise
        return None, _LoadFindings(differences=(str(error),))


def _blob(
    reader: CheckpointReader, rank: int, name: str, *, by_all: bool = False
) -> dict[str, Any] | None:
    try:
        data = reader.blob(rank, name, by_all=by_all)
    except MismatchError:  # there was no such rank, or it saved no such blob
        return None
    return codec.decode(data) if data else None


def _mismatch(where: str, differences: list[str]) -> MismatchError:
    lines = sorted(set(differences))
    more = [f"and {len(lines) - _LISTED_MAX} more"] if len(lines) > _LISTED_MAX else []
    return MismatchError(
        f"{where} does not fit this state; nothing was touched; strict=False, skip=, rename= and"
        " cast=True of load accept differences. Differences:\n  "
        + "\n  ".join(lines[:_LISTED_MAX] + more)
    )
