"""Audit records of the controller: digests, verdicts, agreements and barred copies.

Replicas are ranks with the same `replica_set`. Each reports one digest per kind of state. Names are
requested only for kinds that differ, and only from one rank of each class of equal ranks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from outlast.transport import messages

SAVED_MAX = 8
_GENERATION = re.compile(r"g([0-9]{1,18})$")
CLASSES_MAX = 8  # representatives of a replica set whose names are requested
NAMES_MAX = 16  # names of tensors in a verdict
OPTIONAL_KINDS = ("buffers",)  # may be rank-local on one rank and replicated on another

Names = Mapping[str, Mapping[str, bytes]]  # kind -> name -> digest


class ReplicaDigests(msgspec.Struct, frozen=True, gc=False):
    """Report of one rank: its replica set, and one digest per kind."""

    replica_set: bytes
    kinds: dict[str, bytes]


class AuditVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of comparing the reports of all ranks.

    `compared`: ranks that have at least one replica. `majority`: the ranks that agree in each
    disputed set. `tensors`: differing tensors, or their kinds if names are unknown. `ask`: ranks
    whose names of `kinds` are needed first (outcome "ask" only). `kinds`: those that differ.
    """

    outcome: Literal["agreed", "minority", "no majority", "ask"]
    compared: int = 0
    minority: tuple[int, ...] = ()
    majority: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    more: int = 0  # differing tensors beyond `tensors`
    ask: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()


def judge(
    holdings: Mapping[int, ReplicaDigests],
    names: Mapping[int, Names],
    origins: Mapping[int, int] | None = None,
    *,
    may_ask: bool = True,
) -> AuditVerdict:
    """Compare the reports of all ranks.

    `names`: answers so far, by rank. `origins`: by rank, the rank whose state it copied. A donor
    and its copies have one vote together, since the donor may have been wrong. Their majority casts
    that vote, since a rank that differs from it has changed later. With `may_ask` False, missing
    names of tensors are replaced by their kinds.
    """
    origins = origins or {}
    sets: dict[bytes, list[int]] = {}
    for rank in sorted(holdings):
        sets.setdefault(holdings[rank].replica_set, []).append(rank)
    compared = sum(len(ranks) for ranks in sets.values() if len(ranks) > 1)
    disputed = [
        classes for ranks in sets.values() if len(classes := _classes(ranks, holdings, origins)) > 1
    ]
    if not disputed:
        return AuditVerdict(outcome="agreed", compared=compared)
    kinds = tuple(sorted({kind for each in disputed for kind in _differing(each, holdings)}))
    ask = tuple(ranks[0] for each in disputed for ranks in each[:CLASSES_MAX])
    if may_ask and any(rank not in names for rank in ask):
        return AuditVerdict(outcome="ask", compared=compared, ask=ask, kinds=kinds)
    return _decide(disputed, holdings, names, origins, compared)


def _votes(classes: Sequence[Iterable[int]], origins: Mapping[int, int]) -> list[int]:
    """Count the votes of each class of equal ranks."""
    digests: dict[int, Counter[int]] = {}
    for at, ranks in enumerate(classes):
        for rank in ranks:
            digests.setdefault(origins.get(rank, rank), Counter())[at] += 1
    votes = [0] * len(classes)
    for count in digests.values():
        (most, top_votes), *others = count.most_common(2)
        if not others or top_votes > others[0][1]:
            votes[most] += 1
    return votes


def _classes(
    ranks: list[int], holdings: Mapping[int, ReplicaDigests], origins: Mapping[int, int]
) -> list[list[int]]:
    """Return the classes of ranks with equal digests, the class with most votes first."""
    by_digest: dict[tuple[tuple[str, bytes], ...], list[int]] = {}
    before: dict[str, bytes] | None = None  # of the last rank: nearly always those of the next
    equal: list[int] = []
    for rank in ranks:
        kinds = holdings[rank].kinds
        if kinds != before:
            before, equal = kinds, by_digest.setdefault(tuple(sorted(kinds.items())), [])
        equal.append(rank)
    classes = list(by_digest.values())
    if len(classes) == 1:
        return classes
    votes = _votes(classes, origins)
    order = sorted(range(len(classes)), key=lambda at: (-votes[at], classes[at][0]))
    return [classes[at] for at in order]


def _differing(classes: list[list[int]], holdings: Mapping[int, ReplicaDigests]) -> set[str]:
    kinds = [holdings[ranks[0]].kinds for ranks in classes]
    return {kind for each in kinds for kind in each if len({k.get(kind) for k in kinds}) > 1}


def _decide(
    disputed: list[list[list[int]]],
    holdings: Mapping[int, ReplicaDigests],
    names: Mapping[int, Names],
    origins: Mapping[int, int],
    compared: int,
) -> AuditVerdict:
    minority: list[int] = []
    majority: list[int] = []
    tensors: dict[str, None] = {}
    undecided = False
    for classes in disputed:
        first, others = classes[0], classes[1:]
        agreeing, differing = list(first), list[list[int]]()
        for ranks in others:
            differences = _differences(first[0], ranks[0], holdings, names)
            if differences:
                differing.append(ranks)
            else:
                agreeing += ranks
            tensors.update(dict.fromkeys(differences))
        votes, *against = _votes([agreeing, *differing], origins)
        if differing:
            undecided = undecided or votes <= sum(against)
            majority += agreeing
            minority += itertools.chain.from_iterable(differing)
    if not minority:
        return AuditVerdict(outcome="agreed", compared=compared)
    kinds = {kind for each in disputed for kind in _differing(each, holdings)}
    return AuditVerdict(
        outcome="no majority" if undecided else "minority",
        compared=compared,
        kinds=tuple(sorted(kinds)),
        minority=tuple(sorted(minority)),
        majority=tuple(sorted(majority)),
        tensors=tuple(tensors)[:NAMES_MAX],
        more=max(0, len(tensors) - NAMES_MAX),
    )


def _differences(
    one: int, other: int, holdings: Mapping[int, ReplicaDigests], names: Mapping[int, Names]
) -> list[str]:
    """Return the differences between two ranks: tensor names, or kinds if names are unknown."""
    a, b = holdings[one].kinds, holdings[other].kinds
    names_differing: list[str] = []
    for kind in sorted(a.keys() | b.keys()):
        if a.get(kind) == b.get(kind):
            continue
        remaining, right = (names.get(rank, {}).get(kind) for rank in (one, other))
        if remaining is None or right is None:
            names_differing.append(kind)
            continue
        shared = remaining.keys() & right.keys()
        wanted = shared if kind in OPTIONAL_KINDS else remaining.keys() | right.keys()
        differing = sorted(name for name in wanted if remaining.get(name) != right.get(name))
        if not differing and kind not in OPTIONAL_KINDS:
            differing = [kind]
        names_differing += differing
    return names_differing


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of all replicas on one part of the state after phase n."""

    n: int
    step: int
    part: int = 0
    parts: int = 1


class AuditRound(msgspec.Struct, frozen=True, kw_only=True):
    """One audit of phase n while reports come in. `since` is None once a report has none."""

    generation: int
    n: int
    step: int
    part: int
    parts: int
    names: dict[int, dict[str, dict[str, bytes]]] = {}
    names_requested: tuple[
        int, ...
    ] = ()  # ranks whose names were requested; none: no difference so far
    asked_ns: int = 0
    again: int = 0  # a vote has shown the difference: how often, before this phase was complete
    since: Agreement | None = None  # on what votes compare, by the reports so far
    devices: dict[int, str] = {}  # by rank
    has_equal_gradients: bool = False
    repeats: bool = False


class CorruptionStrike(msgspec.Struct, frozen=True, kw_only=True):
    """Wrong bits on one rank, at phase n. `device`: "rank 3" where no device is known."""

    host: str
    device: str
    rank: int
    n: int
    step: int
    t_ns: int
    is_lasting: bool = False


class CopyBar(msgspec.Struct, frozen=True):
    """Bar on copies beyond phase `after_n` up to `generation`, whose state may be disputed."""

    after_n: int
    generation: int

    def covers(self, n: int, path: str) -> bool:
        """Return whether a restart must not use the copy of phase n in directory `path`."""
        return n > self.after_n and generation_of(path) <= self.generation


class AuditState(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the controller's state: agreements, bars and rounds (audit_protocol)."""

    rounds: dict[int, AuditRound] = {}  # by n
    newest: Agreement | None = None
    whole: Agreement | None = None  # all state was found equal then or later; None: never
    saved: tuple[messages.Checkpointed, ...] = ()  # the newest complete copies that are not barred
    bars: tuple[CopyBar, ...] = ()
    origins: dict[int, int] = {}  # rank -> rank whose state it copied since `whole`
    blamed: dict[int, tuple[int, ...]] = {}  # rank -> when its worker was replaced for an audit
    strikes: tuple[CorruptionStrike, ...] = ()  # of the last hour
    answered: messages.AuditAgreed | None = None  # to the last dispute
    undecided: bool = False  # replicas differ without a majority
    start_n: int | None = None  # the earliest phase from which all ranks started

    @property
    def is_disputed(self) -> bool:
        """Return whether replicas are known to differ and requested names are pending."""
        return any(audit_round.names_requested for audit_round in self.rounds.values())

    def agreed(self, point: Agreement) -> AuditState:
        """Return the state after one more agreement on a part of the state, or on all of it."""
        if point.parts == 1:
            return replace(self, newest=point, whole=point, origins={})
        return replace(self, newest=point)

    def covered(self, since: Agreement) -> AuditState:
        """Return the state after all replicas were found equal after phase `since` or later."""
        is_newer = self.whole is None or since.n > self.whole.n
        return replace(self, whole=since) if is_newer else self

    def begun_again(self, n: int, step: int) -> AuditState:
        """Return the state without agreements beyond phase n, for a start before phase n+1."""
        start = Agreement(n, step)
        whole = self.whole if self.whole is None or self.whole.n <= n else start
        newest = self.newest if self.newest is None or self.newest.n <= n else start
        first = n if self.start_n is None else min(n, self.start_n)
        begun = replace(self, rounds={}, undecided=False, origins={}, start_n=first)
        return replace(begun, whole=whole, newest=newest)

    @property
    def trusted_n(self) -> int:
        """Phase up to which copies are undisputed: the last complete agreement, else the start."""
        return self.whole.n if self.whole is not None else self.start_n or 0

    def copied(self, transfers: Iterable[tuple[int, int]]) -> AuditState:
        """Return the state after joiners have copied their donors' state."""
        origins = dict(self.origins)
        for donor, joiner in transfers:
            origins[joiner] = self.origins.get(donor, donor)
        return replace(self, origins=origins)

    def is_barred(self, copy: messages.Checkpointed) -> bool:
        """Return whether a restart must not use a copy."""
        return is_barred(self.bars, copy.n, copy.path)

    def with_copy(self, copy: messages.Checkpointed) -> AuditState:
        """Return the state with one more complete copy."""
        if self.is_barred(copy):
            return self
        return replace(self, saved=(*self.saved, copy)[-SAVED_MAX:])

    def barred(self, bar: CopyBar) -> AuditState:
        """Return the state without the copies that `bar` covers."""
        bars = (*self.bars, bar)
        saved = tuple(copy for copy in self.saved if not is_barred(bars, copy.n, copy.path))
        return replace(self, bars=bars, saved=saved)

    def newest_copy(self, tier: str = "") -> messages.Checkpointed | None:
        """Return the newest copy of a tier ("": any) that is not barred; memory before disk for
        equal phases."""
        found = (one for one in self.saved if tier in ("", one.tier))
        return max(found, key=lambda one: (one.n, one.tier == "memory"), default=None)


def is_barred(bars: Iterable[CopyBar], n: int, path: str) -> bool:
    """Return whether a restart must not use the copy of phase n in directory `path`."""
    return any(bar.covers(n, path) for bar in bars)


def generation_of(path: str) -> int:
    """Return the generation in which a copy was made, by its directory's name; 0: unknown."""
    match = _GENERATION.search(path)
    return int(match[1]) if match else 0
