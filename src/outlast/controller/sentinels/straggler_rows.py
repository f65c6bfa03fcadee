"""Rows of own times, put together from what agents report of their ranks.

Records of a rank are sums since its process began, at steps that are multiples of a power of two.
A row is complete when all ranks have a record at its step; it holds the differences to the row
before. Ranks may report different steps, of which the common ones make rows.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from outlast.controller.inputs import FindingKey
from outlast.controller.recovery.recovery_policy import STRAGGLER
from outlast.controller.sentinels.straggler_detection import (
    RankTime,
    StepRow,
    StragglerRecord,
    observe,
)
from outlast.controller.state_parts import StatePart
from outlast.events import Warned
from outlast.transport.worker_page import OwnTimeRecord

JUDGED_ROWS = 48  # of a rank's new worker
_PENDING_MAX = 65_536  # records that wait for those of other ranks
_ROWS_PENDING = (4, 256)


class MovedRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that was moved because it was slow, and is not judged yet."""

    t_ns: int
    excess: float = 0.0  # before the move; 0: not known in this term
    host: str = ""


class ShownFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Newest event about a slow rank, or about the collectives."""

    worker: str = ""
    excess: float = 0.0
    lost_s: float = 0.0  # at the event
    severity: str = "warn"


class StragglerWatch(StatePart, kw_only=True):
    """Own times of ranks, and what has become of slow ones (straggler_watch)."""

    generation: int = 0
    rows: int = 0  # of this generation
    step: int = 0  # of the newest row
    base: dict[int, OwnTimeRecord] = msgspec.field(default_factory=dict)  # of the newest row
    pending: dict[tuple[int, int], OwnTimeRecord] = msgspec.field(
        default_factory=dict
    )  # by step and rank
    counts: dict[int, int] = msgspec.field(default_factory=dict)  # of them, by step
    record: StragglerRecord = msgspec.field(default_factory=StragglerRecord)
    stages: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)  # by rank
    shown: dict[int, ShownFinding] = msgspec.field(default_factory=dict)  # by rank; REST
    carried_s: dict[int, float] = msgspec.field(default_factory=dict)  # lost before this generation
    moved: dict[int, MovedRank] = msgspec.field(default_factory=dict)  # by rank
    judged: dict[int, int] = msgspec.field(default_factory=dict)  # rank -> time of its judged move
    work: tuple[int, ...] = ()  # ranks whose work is larger: as slow on another machine
    move_s: float = 0.0  # the longest move that was measured
    is_uneven: bool = False  # was noted

    def begin(self, generation: int) -> None:
        """Begin a generation, whose ranks may have other workers."""
        self.generation = generation
        self.rows = self.step = 0
        self.base, self.pending, self.counts = {}, {}, {}
        self.record = StragglerRecord()

    def note_stages(self, rank: int, stages: tuple[int, ...]) -> None:
        """Record the stages of a pipeline that a rank has."""
        self.stages[rank] = stages

    def add(self, rank: int, one: OwnTimeRecord, ranks: int) -> StepRow | None:
        """Take a record of a rank; return the row that it completes. `ranks`: that are present."""
        key = one.step, rank
        if one.generation != self.generation or one.step <= self.step or key in self.pending:
            return None
        self.pending[key] = one
        count = self.counts[one.step] = self.counts.get(one.step, 0) + 1
        if count >= ranks:
            return self._complete(one.step)
        if len(self.counts) > min(_ROWS_PENDING[1], max(_ROWS_PENDING[0], _PENDING_MAX // ranks)):
            ordered = sorted(self.counts)
            self._drop(ordered[: len(ordered) // 2])  # rarely, since it looks at all of them
        return None

    def _complete(self, step: int) -> StepRow | None:
        newest = {rank: one for (at, rank), one in self.pending.items() if at == step}
        self._drop(at for at in tuple(self.counts) if at <= step)
        before, self.base, self.step = self.base, newest, step
        steps = min(
            (one.steps - before[rank].steps for rank, one in newest.items() if rank in before),
            default=0,
        )
        if steps <= 0 or before.keys() != newest.keys():
            return None
        times = {
            rank: RankTime(
                (one.own_us - before[rank].own_us) / (one.steps - before[rank].steps) / 1e6,
                (one.before_us - before[rank].before_us) / (one.steps - before[rank].steps) / 1e6,
            )
            for rank, one in newest.items()
        }
        first = next(iter(newest))
        passed = newest[first].steps - before[first].steps
        step_s = (newest[first].step_us - before[first].step_us) / passed / 1e6
        return StepRow(step, steps, step_s, times)

    def _drop(self, steps: Iterable[int]) -> None:
        dropped = set(steps)
        self.counts = {at: count for at, count in self.counts.items() if at not in dropped}
        self.pending = {key: one for key, one in self.pending.items() if key[0] not in dropped}

    def observe(self, row: StepRow) -> None:
        """Let the detector take a row."""
        self.rows += 1
        kinds: dict[tuple[int, ...], list[int]] = {}
        for rank in row.ranks:
            kinds.setdefault(self.stages.get(rank, ()), []).append(rank)
        observe(self.record, row, tuple(kinds.values()))

    def find_moves(self, moves: Iterable[tuple[FindingKey, int]]) -> list[int]:
        """Take the moves of slow ranks, of this and of earlier terms; return the ranks whose move
        is new."""
        found: list[int] = []
        for key, t_ns in moves:
            rank = rank_of(key) if key.check == STRAGGLER else -1
            known = self.moved.get(rank)
            newest_ns = max(self.judged.get(rank, 0), known.t_ns if known else 0)
            if rank < 0 or t_ns <= newest_ns:
                continue
            shown = self.shown.pop(rank, ShownFinding())
            self.moved[rank] = MovedRank(t_ns=t_ns, excess=shown.excess, host=key.host)
            found.append(rank)
        return found

    def judge(self, rank: int, *, is_work: bool) -> MovedRank:
        """Record what a move has shown: the rank's work is larger, or its machine was slow."""
        moved = self.moved.pop(rank)
        self.judged[rank] = moved.t_ns
        if is_work:
            self.work = (*self.work, rank)
        return moved

    def show(self, rank: int, finding: ShownFinding) -> None:
        """Record the newest event about a rank."""
        self.shown[rank] = finding

    def hide(self, rank: int) -> ShownFinding:
        """Forget a finding that is over."""
        self.carried_s.pop(rank, None)
        return self.shown.pop(rank)

    def carry(self, lost_s: dict[int, float]) -> None:
        """Keep what ranks have cost before this generation."""
        self.carried_s = lost_s

    def lost_s(self, rank: int) -> float:
        """Return what all ranks have waited for a slow rank."""
        one = self.record.suspects.get(rank)
        return self.carried_s.get(rank, 0.0) + (one.lost_s if one and one.is_slow else 0.0)

    def measure_move(self, seconds: float) -> None:
        """Record how long a move took, until steps were made again."""
        self.move_s = max(self.move_s, seconds)

    def note_uneven(self) -> None:
        """Record that uneven work was noted."""
        self.is_uneven = True


def device_name(rank: int) -> str:
    """Return the device of a finding about a rank."""
    return f"rank {rank}"


def rank_of(key: FindingKey | Warned) -> int:
    """Return the rank of a finding; -1 where it has none."""
    name, _, number = key.device.partition(" ")
    return int(number) if name == "rank" and number.isdigit() else -1
