"""Events of a run in the order of time, most of them in columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from outlast.errors import RunDirError
from outlast.events import AnyEvent
from outlast.telemetry.event_store import DIRECTORY, EventReader
from outlast.telemetry.history.event_columns import (
    BlockDecoder,
    EventColumns,
    MetricColumns,
    PhaseColumns,
    no_metrics,
    no_phases,
)
from outlast.telemetry.segment_files import SegmentDamage

_Columns = TypeVar("_Columns", PhaseColumns, MetricColumns)
ROOM = 8  # columns that are full grow by this part
_LARGE = np.iinfo(np.int64).max
_Key = tuple[int, int]  # time and arrival


class RunHistory:
    """All events of a run so far, by time; those of one time in the order in which they were read.

    `events`: those other than PhaseDone and Metrics, which are columns: `phases`, `metrics`.
    `count`: of all of them.
    """

    def __init__(self) -> None:
        self.phases, self.metrics = no_phases(), no_metrics()
        self._losses = self.metrics, self.metrics  # of the metrics that they are from
        self._phases, self._metrics = _Grown(self.phases), _Grown(self.metrics)
        self.events: list[AnyEvent] = []
        self._keys: list[_Key] = []  # of `events`
        self._decoder = BlockDecoder()

    @classmethod
    def of(cls, events: Iterable[AnyEvent]) -> RunHistory:
        """Return the history of these events."""
        history = cls()
        new = EventColumns([], [], [])
        history._decoder.objects(events, new)
        history._extend(new)
        return history

    @property
    def count(self) -> int:
        """Number of events."""
        return len(self.phases.t_ns) + len(self.metrics.t_ns) + len(self.events)

    @property
    def workers(self) -> Sequence[str]:
        """Names of workers, by their number in the columns."""
        return self._decoder.workers.texts

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of phases, by their number in the columns."""
        return self._decoder.kinds.texts

    def read(self, reader: EventReader, *, last: bool = False) -> int:
        """Add what a reader finds; return the number of new events."""
        before = self.count
        new = EventColumns([], [], [])
        for path, block in reader.blocks(last=last):
            self._decoder.block(
                block.data,
                np.frombuffer(block.begins, np.int64),
                np.frombuffer(block.ends, np.int64),
                lambda begin, end, path=path, block=block: reader.decode(path, block, begin, end),
                new,
            )
        self._extend(new)
        return self.count - before

    def phases_before(self, index: int) -> int:
        """Return the number of phases before the event of that index."""
        return _before(self.phases, self._keys[index])

    def phases_until(self, t_ns: int) -> int:
        """Return the number of phases that ended by then."""
        return int(np.searchsorted(self.phases.t_ns, t_ns, "right"))

    def metrics_before(self, index: int) -> int:
        """Return the number of metrics before the event of that index."""
        return _before(self.metrics, self._keys[index])

    def losses(self) -> MetricColumns:
        """Return the metrics with a loss of the lowest rank that reports one."""
        of_all, known = self._losses
        if of_all is not self.metrics:
            of_all = self.metrics
            lowest = of_all.seat.min(initial=_LARGE, where=of_all.has_loss)
            which = np.flatnonzero(of_all.has_loss & (of_all.seat == lowest))
            known = MetricColumns(*(column[which] for column in of_all))
            self._losses = of_all, known
        return known

    def _extend(self, new: EventColumns) -> None:
        self.phases = self._phases.joined(new.phases)
        self.metrics = self._metrics.joined(new.metrics)
        if not new.others:
            return
        keyed = [((event.t_ns, arrival), event) for arrival, event in new.others]
        keyed.sort(key=_key)
        at = bisect_right(self._keys, keyed[0][0])
        if at < len(self._keys):  # a slow writer's events are older than those of others
            late = list(zip(self._keys[at:], self.events[at:], strict=True))
            keyed = sorted([*late, *keyed], key=_key)
        self._keys[at:] = [key for key, _ in keyed]
        self.events[at:] = [event for _, event in keyed]


def read_history(
    run_dir: Path, damaged: Callable[[SegmentDamage], None] | None = None
) -> RunHistory:
    """Return the history of a run, live or finished.

    Damage is handed to `damaged` (default: a RuntimeWarning) and skipped. Raises RunDirError when
    `run_dir` holds no events at all.
    """
    history = RunHistory()
    if not history.read(EventReader(run_dir, damaged), last=True):
        raise RunDirError(
            f"{run_dir} holds no events of a run ({run_dir / DIRECTORY} is missing or empty);"
            " give the directory that `outlast run` printed at its start"
        )
    return history


def _key(one: tuple[_Key, AnyEvent]) -> _Key:
    return one[0]


class _Grown(Generic[_Columns]):
    """Columns by time and arrival, with room for more: what was handed out changes with them."""

    def __init__(self, columns: _Columns) -> None:
        self._known = self._room = columns

    def joined(self, new: Sequence[_Columns]) -> _Columns:
        """Return the columns with new ones."""
        old = self._known
        if not new:
            return old
        added = _by_time(type(old)(*map(np.concatenate, zip(*new, strict=True))))
        at = _before(old, (int(added.t_ns[0]), int(added.arrival[0])))
        if at < len(old.t_ns):
            late = type(old)(*(column[at:] for column in old))
            added = _by_time(type(old)(*map(np.concatenate, zip(late, added, strict=True))))
        count = at + len(added.t_ns)
        if not at:
            self._room = added
        elif count > len(self._room.t_ns):
            room = (np.empty(count + count // ROOM, column.dtype) for column in old)
            self._room = type(old)(*room)
            for column, kept in zip(self._room, old, strict=True):
                column[:at] = kept[:at]
        for column, more in zip(self._room, added, strict=True):
            column[at:count] = more
        self._known = type(old)(*(column[:count] for column in self._room))
        return self._known


def _by_time(columns: _Columns) -> _Columns:
    order = np.lexsort((columns.arrival, columns.t_ns))
    return type(columns)(*(column[order] for column in columns))


def _before(columns: PhaseColumns | MetricColumns, key: _Key) -> int:
    """Return the number of rows before a time and arrival."""
    t_ns, arrival = key
    begin = int(np.searchsorted(columns.t_ns, t_ns, "left"))
    end = int(np.searchsorted(columns.t_ns, t_ns, "right"))
    return begin + int(np.searchsorted(columns.arrival[begin:end], arrival, "left"))
