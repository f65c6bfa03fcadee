"""Audits as the controller knows them: rounds under way, the last agreement, copies not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from outlast.controller.audit.audit_verdict import ReplicaDigests
from outlast.transport import messages

SAVED_MAX = 8
_GENERATION = re.compile(r"g([0-9]{1,18})$")


class AuditRound(msgspec.Struct, frozen=True, kw_only=True):
    """One audit of phase n while reports come in."""

    generation: int
    n: int
    step: int
    part: int
    parts: int
    holdings: dict[int, ReplicaDigests] = {}
    names: dict[int, dict[str, dict[str, bytes]]] = {}
    names_requested: tuple[
        int, ...
    ] = ()  # ranks whose names were asked for; none: nothing differs so far
    asked_ns: int = 0


class Agreement(msgspec.Struct, frozen=True):
    """All replicas held the same of one part of the state after phase n."""

    n: int
    step: int
    part: int = 0
    parts: int = 1


class CopyBar(msgspec.Struct, frozen=True):
    """Copies beyond phase `after_n` made up to `generation` may hold what replicas disagree on."""

    after_n: int
    generation: int

    def covers(self, n: int, path: str) -> bool:
        """Return whether the copy of phase n in directory `path` must not be started from."""
        return n > self.after_n and generation_of(path) <= self.generation


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the controller's state: agreements, bars and rounds (audit_protocol)."""

    rounds: dict[int, AuditRound] = {}  # by n
    newest: Agreement | None = None
    recent: tuple[Agreement, ...] = ()  # of parts, in a row, with no other outcome between
    whole: Agreement | None = None  # all of the state agreed then, or since; None: never
    saved: tuple[messages.Checkpointed, ...] = ()  # the newest complete copies that are not barred
    bars: tuple[CopyBar, ...] = ()
    origins: dict[int, int] = {}  # rank -> whose state its copy is, since all agreed
    blamed: dict[int, int] = {}  # rank -> how often its worker was replaced for an audit
    undecided: bool = False  # replicas differ and nothing says which of them is right

    @property
    def is_disputed(self) -> bool:
        """Return whether replicas are known to differ, and names are still waited for."""
        return any(one.names_requested for one in self.rounds.values())

    def agreed(self, point: Agreement) -> AuditState:
        """Return the state after one more agreement."""
        if point.parts == 1:
            return replace(self, newest=point, whole=point, recent=(), origins={})
        same = [one for one in self.recent if one.parts == point.parts]
        recent = (*same, point)[-point.parts :]
        whole = self.whole
        if {one.part for one in recent} == set(range(point.parts)):
            whole = recent[0] if whole is None or recent[0].n > whole.n else whole
        return replace(self, newest=point, recent=recent, whole=whole)

    def begun_again(self, n: int, step: int) -> AuditState:
        """Return the state when everybody starts before phase n+1: later agreements are void."""
        start = Agreement(n, step)
        whole = self.whole if self.whole is None or self.whole.n <= n else start
        newest = self.newest if self.newest is None or self.newest.n <= n else start
        return replace(
            self, rounds={}, recent=(), whole=whole, newest=newest, undecided=False, origins={}
        )

    def copied(self, transfers: Iterable[tuple[int, int]]) -> AuditState:
        """Return the state when joiners have what donors had, right or wrong."""
        origins = dict(self.origins)
        for donor, joiner in transfers:
            origins[joiner] = self.origins.get(donor, donor)
        return replace(self, origins=origins)

    def is_barred(self, copy: messages.Checkpointed) -> bool:
        """Return whether a copy must not be started from."""
        return is_barred(self.bars, copy.n, copy.path)

    def with_copy(self, copy: messages.Checkpointed) -> AuditState:
        """Return the state with one more complete copy."""
        if self.is_barred(copy):
            return self
        return replace(self, saved=(*self.saved, copy)[-SAVED_MAX:])

    def barred(self, bar: CopyBar) -> AuditState:
        """Return the state with what `bar` covers out of use."""
        bars = (*self.bars, bar)
        saved = tuple(copy for copy in self.saved if not is_barred(bars, copy.n, copy.path))
        return replace(self, bars=bars, saved=saved)

    def newest_copy(self) -> messages.Checkpointed | None:
        """Return the newest known copy that is not barred; of one place the nearer one."""
        return max(self.saved, key=lambda one: (one.n, one.tier == "memory"), default=None)


def is_barred(bars: Iterable[CopyBar], n: int, path: str) -> bool:
    """Return whether the copy of phase n in directory `path` must not be started from."""
    return any(bar.covers(n, path) for bar in bars)


def generation_of(path: str) -> int:
    """Return the generation in which a copy was made, by its directory's name; 0: unknown."""
    found = _GENERATION.search(path)
    return int(found[1]) if found else 0
