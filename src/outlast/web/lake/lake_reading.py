"""Reading of a lake: tables in memory and results of the newest queries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TypeVar

import polars as pl

from outlast.errors import LakeError, OutlastError, UsageError
from outlast.fleet.lake import MANIFEST, Lake
from outlast.fleet.lake_selection import (
    cluster_names,
    known_period,
    load_window,
    resolve_cluster,
    select_partition,
)
from outlast.fleet.record_tables import Tables
from outlast.fleet.report.fleet_report import (
    FleetReport,
    finished_report,
    hidden_record_notes,
    load_tables,
    report_sections,
)
from outlast.fleet.report.report_sections import DrawnSection, ReportFacts
from outlast.web.lake.lake_query import NAMELESS, LakeQuery, parse_lake_query

T = TypeVar("T")
WINDOWS_MAX = 2  # tables in memory
QUERIES_MAX = 3  # with facts and reports


class LakeAnswer:
    """Results of one query: facts, each computed when needed, and a report once it is whole."""

    def __init__(self, facts: ReportFacts, cluster: str, notes: list[str]) -> None:
        self.facts = facts
        self.cluster = cluster
        self.notes = notes
        self.sections: tuple[DrawnSection, ...] = ()
        self.report: FleetReport | None = None


class LakeChoices:
    """Choices of a lake's form.

    `clusters`: names, if the lake has several; `partitions`: those with jobs in the window, or
    none where it cannot be read; `since_ns`, `until_ns`: the known period.
    """

    def __init__(self) -> None:
        self.clusters: list[str] = []
        self.partitions: list[str] = []
        self.since_ns: int | None = None
        self.until_ns: int | None = None


class LakeReading:
    """A lake as of now; several threads may ask, and one computes at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._lake: Lake | None = None
        self._state: tuple[int, ...] = ()
        self._windows: OrderedDict[Hashable, tuple[Tables, list[str]]] = OrderedDict()
        self._answers: OrderedDict[Hashable, LakeAnswer] = OrderedDict()

    def answer(self, query: LakeQuery) -> LakeAnswer:
        """Return the results of a query. Raises LakeError, UsageError."""
        with self.lock:
            lake = self._opened()
            return _kept(self._answers, query, QUERIES_MAX, lambda: self._answer(lake, query))

    def sections(self, found: LakeAnswer) -> Iterator[DrawnSection]:
        """Yield the sections of a report, each as soon as it is ready, and complete `found`.

        The lock is free while the reader of the sections does something else.
        """
        if found.report is not None:
            yield from found.sections
            return
        drawn: list[DrawnSection] = []
        following = report_sections(found.facts)
        while True:
            with self.lock:
                section = next(following, None)
                if section is None:
                    break
                drawn.append(section)
            yield section
        with self.lock:
            found.sections = tuple(drawn)
            found.report = finished_report(
                found.facts,
                drawn,
                str(self.path),
                cluster=found.cluster,
                notes=found.notes,
            ).report

    def choices(self, query: LakeQuery) -> LakeChoices:
        """Return the choices of the form, as far as the lake can be read."""
        found = LakeChoices()
        try:
            with self.lock:
                lake = self._opened()
                found.clusters = _clusters(lake)
                found.since_ns, found.until_ns = known_period(lake, query.cluster)
                tables, _ = self._window(lake, query)
                column = tables.jobs.select(pl.col("partition").unique().sort()).collect()
                found.partitions = [name or NAMELESS for name in column["partition"]]
        except (OutlastError, OSError, pl.exceptions.PolarsError):
            pass  # the page shows the refusal of the query itself
        return found

    def default(self, query: LakeQuery) -> LakeQuery:
        """Return the query with the first cluster of several, if it names none."""
        clusters = self.choices(query).clusters if query.cluster is None else []
        return parse_lake_query({**query.texts(), "cluster": clusters[0]}) if clusters else query

    def _answer(self, lake: Lake, query: LakeQuery) -> LakeAnswer:
        tables, shared = self._window(lake, query)
        notes = list(shared)
        chosen = select_partition(tables, query.partition, notes)
        notes += hidden_record_notes(lake.manifest.sources)
        cluster = resolve_cluster(lake, query.cluster)
        return LakeAnswer(ReportFacts(load_tables(chosen), query.above_gpus), cluster, notes)

    def _window(self, lake: Lake, query: LakeQuery) -> tuple[Tables, list[str]]:
        """Return a window's tables in memory, of all partitions, and its notes."""

        def read() -> tuple[Tables, list[str]]:
            notes: list[str] = []
            tables = load_window(lake, query.since, query.until, cluster=query.cluster, notes=notes)
            return load_tables(tables), notes

        key = (query.since, query.until, query.cluster)
        return _kept(self._windows, key, WINDOWS_MAX, read)

    def _opened(self) -> Lake:
        """Return the lake, opened anew if it has changed. Raises LakeError."""
        try:
            stat = (self.path / MANIFEST).stat()
        except OSError as error:
            raise LakeError(f"{self.path} cannot be read: {error.strerror or error}") from error
        state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if self._lake is None or state != self._state:
            self._lake = None
            self._windows.clear()
            self._answers.clear()
            self._lake = Lake.open(self.path)
            self._state = state
        return self._lake


def _clusters(lake: Lake) -> list[str]:
    """Return the clusters to choose from; none where the lake has one."""
    try:
        resolve_cluster(lake, None)
    except UsageError:
        names = set[str]().union(*cluster_names(lake).values())
        return [name or NAMELESS for name in sorted(names, key=lambda name: (not name, name))]
    return []


def _kept(store: OrderedDict[Hashable, T], key: Hashable, most: int, make: Callable[[], T]) -> T:
    """Return a stored value, or make it; the least recently used ones are dropped first."""
    if key not in store:
        while len(store) >= most:
            store.popitem(last=False)
        store[key] = make()
    store.move_to_end(key)
    return store[key]
