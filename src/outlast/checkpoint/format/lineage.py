"""The order of a job's checkpoints: lines, bases and parents. Pure.

    line 0:  100 -- 200 -- 300               load(step=100) goes back:
              +----- line 1:  110 -- 120      110 is newer than 300, its base is 100

Positions are (line, step, n). A save whose position would be behind the greatest in its directory
begins a line, with a number of its own; at an equal position the later commit is newer.

The newest checkpoint and its predecessors are its *ancestry*. The last checkpoint of a line outside
the ancestry is that line's *end*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from outlast.checkpoint.format.manifests import LINES_MAX, SavePoint
from outlast.errors import UsageError


class Lineage(msgspec.Struct):
    """Position of a run's saves among those of its directory. The same on all ranks.

    `line`, `base`: of the next save, unless that goes back. `last`: the greatest known position;
    `parent`: the directory of the previous save or load.
    """

    line: int = 0
    base: str = ""
    parent: str = ""
    last: tuple[int, int, int] = (-1, -1, -1)

    def go_on(self, step: int, n: int, attempt: str) -> tuple[SavePoint, str, str]:
        """Return the place of the next save, its parent and its base.

        Raises UsageError when there are no more lines.
        """
        if (self.line, step, n) < self.last:
            self.begin_line()
        place, parent = SavePoint(step, n, attempt, self.line), self.parent
        self.last, self.parent = place.position, place.directory
        return place, parent, self.base

    def begin_line(self) -> None:
        """Begin a line at `parent`, so that later saves are newer than all before."""
        self.line = self.last[0] + 1
        self.base = self.parent
        if self.line > LINES_MAX:
            raise UsageError(f"line {self.line}: a directory has at most {LINES_MAX}; use another")

    def loaded(self, place: SavePoint) -> None:
        """Record that the state is that of `place` now; saves after it belong to an ended line."""
        before, self.parent = self.parent, place.directory
        if place.directory != before and self.last >= (0, 0, 0):
            self.begin_line()


def resume_lineage(
    loaded: SavePoint | None, base: str, newest: SavePoint | None, tip: SavePoint | None
) -> Lineage:
    """Return the lineage of a run that loaded `loaded`, of a line that began at `base`.

    `newest`: the newest committed checkpoint, `tip`: the greatest place, committed or not. A run
    that did not load the newest one begins a line.
    """
    parent = loaded.directory if loaded else ""
    known = [place for place in (loaded, newest, tip) if place]
    last = max((place.position for place in known), default=(-1, -1, -1))
    lineage = Lineage(max(last[0], 0), base, parent, last)
    newest_position = newest.position if newest else (-1, -1, -1)
    continues = loaded is not None and loaded.position >= newest_position
    if continues and loaded is not None and loaded.line == lineage.line:
        return lineage
    if known:
        lineage.begin_line()
    return lineage


def ancestry(
    newest_first: Sequence[SavePoint], bases: Mapping[SavePoint, str]
) -> frozenset[SavePoint]:
    """Return the newest place and its predecessors.

    `bases`: bases of the commit records, "" or missing where there is none. Where the records of a
    line are missing, earlier places are unknown and left out.
    """
    if not newest_first:
        return frozenset()
    base_of_line = {place.line: bases.get(place, "") for place in newest_first}
    ancestors, line, bound = set[SavePoint](), newest_first[0].line, newest_first[0].position
    while True:
        ancestors |= {p for p in newest_first if p.line == line and p.position <= bound}
        base = SavePoint.parse(base_of_line.get(line, ""))
        if base is None or base.line >= line:
            return frozenset(ancestors)
        line, bound = base.line, base.position


def line_ends(
    newest_first: Sequence[SavePoint], ancestors: frozenset[SavePoint]
) -> list[SavePoint]:
    """Return the last checkpoint of each abandoned line, the newest line first."""
    ends: dict[int, SavePoint] = {}
    for place in newest_first:
        if place not in ancestors:
            ends.setdefault(place.line, place)
    return list(ends.values())
