"""Events of a block of records: phases and metrics as columns, others as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlast.events import AnyEvent, Metrics, PhaseDone
from outlast.telemetry.history.record_layouts import (
    LAYOUTS_MAX,
    LOSS,
    ROWS_MIN,
    TAG,
    TAG_AT,
    TAG_END,
    WORD,
    Bytes,
    Places,
    RecordLayout,
    record_layout,
)

Column = NDArray[Any]
Integers = NDArray[np.int64]


class Names:
    """Numbers for names, in the order in which they come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._of_bytes: dict[bytes, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a name."""
        number = self._numbers.setdefault(text, len(self.texts))
        if number == len(self.texts):
            self.texts.append(text)
        return number

    def numbers(self, encoded: NDArray[Any]) -> NDArray[np.int32]:
        """Return the numbers of names in UTF-8. Raises UnicodeDecodeError."""
        if (encoded == encoded[0]).all():
            return np.full(len(encoded), self.number(encoded[0].decode()), np.int32)
        each = encoded.tolist()
        if unknown := {*each} - self._of_bytes.keys():
            self._of_bytes |= {name: self.number(name.decode()) for name in sorted(unknown)}
        return np.array([self._of_bytes[name] for name in each], np.int32)


class PhaseColumns(NamedTuple):
    """PhaseDone events as columns. `arrival`: their place in the order of reading.

    `worker` and `kind` are numbers of names.
    """

    t_ns: Column
    arrival: Column
    begin_ns: Column
    n: Column
    step: Column
    steps: Column
    generation: Column
    seat: Column
    worker: Column
    kind: Column


class MetricColumns(NamedTuple):
    """Metrics events as columns. `loss`: where `has_loss`."""

    t_ns: Column
    arrival: Column
    seat: Column
    step: Column
    loss: Column
    has_loss: Column


PHASE_TYPES = (*[np.int64] * 8, np.int32, np.int16)
METRIC_TYPES = (*[np.int64] * 4, np.float64, np.bool_)


def no_phases() -> PhaseColumns:
    """Return columns without a phase."""
    return PhaseColumns(*(np.empty(0, kind) for kind in PHASE_TYPES))


def no_metrics() -> MetricColumns:
    """Return columns without metrics."""
    return MetricColumns(*(np.empty(0, kind) for kind in METRIC_TYPES))


def rows(phases: PhaseColumns, which: Column | slice) -> PhaseColumns:
    """Return the phases of a mask, of places or of a slice."""
    return PhaseColumns(*(column[which] for column in phases))


def last_of_each(values: Integers) -> Integers:
    """Return the places of the last of each value, in order."""
    if (values[1:] > values[:-1]).all():
        return np.arange(len(values))
    _, newest = np.unique(values[::-1], return_index=True)
    return np.sort(len(values) - 1 - newest)


def newest_rows(phases: PhaseColumns, seats: int) -> Integers:
    """Return the place of the last phase of each seat; -1 without one."""
    newest = np.full(seats, -1)
    begin = len(phases.seat)
    while begin and (newest < 0).any():
        begin = max(0, min(begin - 1, len(phases.seat) - 8 * (len(phases.seat) - begin + seats)))
        part = phases.seat[begin:]
        is_own = (part >= 0) & (part < seats)
        newest[part[is_own]] = begin + np.flatnonzero(is_own)  # the last one of each seat stays
    return newest


def of_kind(phases: PhaseColumns, kinds: Sequence[str], kind: str) -> Integers:
    """Return the places of the phases of a kind. `kinds`: by number."""
    number = kinds.index(kind) if kind in kinds else -1
    return np.flatnonzero(phases.kind == number)


class EventColumns(NamedTuple):
    """Events of one reading: phases and metrics, and all others with their arrival."""

    phases: list[PhaseColumns]
    metrics: list[MetricColumns]
    others: list[tuple[int, AnyEvent]]


class BlockDecoder:
    """Decoder of blocks of records, which learns their layouts.

    `workers`, `kinds`: names of workers and of kinds of phases.
    """

    def __init__(self) -> None:
        self.workers, self.kinds = Names(), Names()
        self._layouts: dict[int, list[RecordLayout]] = {}  # by length of the record
        self._arrived = 0

    def objects(self, events: Iterable[AnyEvent], into: EventColumns) -> None:
        """Add events that are objects already."""
        self._sort(enumerate(events, self._arrived), into)

    def block(
        self,
        data: bytes,
        begins: Places,
        ends: Places,
        decode: Callable[[int, int], AnyEvent | None],
        into: EventColumns,
    ) -> None:
        """Add the records of a block. `decode`: returns the event between two places of `data`."""
        alone = np.ones(len(begins), np.bool_)
        if len(begins) >= ROWS_MIN:
            buffer = np.frombuffer(data, np.uint8)
            lengths = ends - begins
            for length in np.unique(lengths):
                width = int(-(-length // WORD) * WORD)
                chosen = np.flatnonzero((lengths == length) & (begins + width <= len(data)))
                if length > TAG_END and len(chosen) >= ROWS_MIN:
                    windows = np.lib.stride_tricks.sliding_window_view(buffer, width)
                    for taken in self._equal_length(windows, begins, chosen, int(length), into):
                        alone[taken] = False
        first = self._arrived
        decoded = (
            (first + int(index), event)
            for index in np.flatnonzero(alone)
            if (event := decode(int(begins[index]), int(ends[index]))) is not None
        )
        self._sort(decoded, into)
        self._arrived = first + len(begins)

    def _equal_length(
        self, windows: Bytes, begins: Places, chosen: Places, length: int, into: EventColumns
    ) -> Iterator[Places]:
        """Yield the places in the block of records that were added. `chosen`: those of a length."""
        rows = windows[begins[chosen]]
        is_known = (rows[:, TAG_AT:TAG_END] == np.frombuffer(TAG, np.uint8)).all(axis=1)
        known = self._layouts.setdefault(length, [])
        if not is_known.all():
            rows, chosen = rows[is_known], chosen[is_known]
        for layout in [*known]:
            if not len(rows):
                return
            rows, chosen, taken = self._matching(layout, rows, chosen, into)
            yield taken
        for _ in range(LAYOUTS_MAX):
            if len(rows) < ROWS_MIN:
                return
            layout = record_layout(rows[0, :length].tobytes())
            if layout is None:
                rows, chosen = rows[1:], chosen[1:]
                continue
            known.insert(0, layout)
            del known[LAYOUTS_MAX:]
            rows, chosen, taken = self._matching(layout, rows, chosen, into)
            yield taken

    def _matching(
        self, layout: RecordLayout, rows: Bytes, chosen: Places, into: EventColumns
    ) -> tuple[Bytes, Places, Places]:
        """Add the rows of a layout; return those that are left, and the places of those added."""
        matching = layout.matches(rows)
        if not matching.any():
            return rows, chosen, chosen[:0]
        own, places = (rows, chosen) if matching.all() else (rows[matching], chosen[matching])
        table, right = layout.columns(own)
        if not right.all():
            table, places = table[right], places[right]
        try:
            if len(places):
                self._add(layout, table, places + self._arrived, into)
        except UnicodeDecodeError:  # a worker's name: the decoder of events refuses it
            places = places[:0]
        return rows[~matching], chosen[~matching], places

    def _add(
        self, layout: RecordLayout, table: NDArray[np.void], arrival: Integers, into: EventColumns
    ) -> None:
        def integers(name: str) -> Integers:
            return table[name].astype(np.int64)

        names = table.dtype.names or ()
        worker = self.workers.numbers(table["worker"])
        t_ns, seat, step = integers("t_ns"), integers("seat"), integers("step")
        if layout.tag == "Metrics":
            has_loss = np.full(len(table), LOSS in names)
            loss = table[LOSS].astype(np.float64) if LOSS in names else np.zeros(len(table))
            into.metrics.append(MetricColumns(t_ns, arrival, seat, step, loss, has_loss))
            return
        steps = integers("steps") if "steps" in names else np.ones(len(table), np.int64)
        kind = np.full(len(table), self.kinds.number(layout.phase_kind), np.int16)
        into.phases.append(
            PhaseColumns(
                t_ns=t_ns,
                arrival=arrival,
                begin_ns=integers("t_begin_ns"),
                n=integers("n"),
                step=step,
                steps=steps,
                generation=integers("generation"),
                seat=seat,
                worker=worker,
                kind=kind,
            )
        )

    def _sort(self, events: Iterable[tuple[int, AnyEvent]], into: EventColumns) -> None:
        """Add events by their types."""
        phases: list[tuple[Any, ...]] = []
        metrics: list[tuple[Any, ...]] = []
        for arrival, event in events:
            if isinstance(event, PhaseDone):
                phases.append(
                    (
                        event.t_ns,
                        arrival,
                        event.t_begin_ns,
                        event.n,
                        event.step,
                        event.steps,
                        event.generation,
                        event.seat,
                        self.workers.number(event.worker),
                        self.kinds.number(event.kind),
                    )
                )
            elif isinstance(event, Metrics):
                loss = event.values.get("loss")
                metrics.append(
                    (
                        event.t_ns,
                        arrival,
                        event.seat,
                        event.step,
                        0.0 if loss is None else loss,
                        loss is not None,
                    )
                )
            else:
                into.others.append((arrival, event))
            self._arrived = arrival + 1
        if phases:
            each = zip(zip(*phases, strict=True), PHASE_TYPES, strict=True)
            into.phases.append(PhaseColumns(*(np.array(column, kind) for column, kind in each)))
        if metrics:
            each = zip(zip(*metrics, strict=True), METRIC_TYPES, strict=True)
            into.metrics.append(MetricColumns(*(np.array(column, kind) for column, kind in each)))
