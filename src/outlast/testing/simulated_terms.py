"""Terms of a simulated run: the store that hosts share, and candidates that take over.

Requests to the store and its answers take time, and are lost where a host cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from outlast.testing.simulated_agent import SimAgent
    from outlast.testing.simulated_cluster import SimCluster

Answer = TypeVar("Answer")

STORE = "store"
# Shares of a lease.
BEAT_SHARE = 0.06  # between two beats of an owner
SILENCE_SHARE = 0.25  # without an answer of the controller, until a candidate looks at its beat
STILL_SHARE = 0.25  # without a new beat then, until it creates a term
UNLEASED_STILL_SHARE = 1.0  # the same of an agent without a lease
UNHEARD_SHARE = 0.5  # without an answer, at least, of the creator of a term
IN_TOUCH_SHARE = 0.45  # since the answer that every agent has confirmed
USABLE_SHARE = 0.75  # then an agent kills its workers
EXTENDED_SHARE = 0.95  # where it has found a newer term before
_LOOK_SHARE = 0.05


class TermSigns(NamedTuple):
    """Newest term, its beat, and the hosts of the newest record of successors, with its place."""

    newest: int
    beat: int
    record: tuple[int, int]  # its term and number; (0, 0): there is none
    successors: tuple[str, ...]


class SimTermStore:
    """Numbered terms, each created once, with the beats of their owners."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._newest = 0
        self._owners: dict[int, str] = {}
        self._beats: dict[int, int] = {}
        self._records: dict[int, list[tuple[str, ...]]] = {}  # of successors, by term

    def newest(self) -> int:
        """Return the newest term."""
        return self._newest

    def create(self, term: int, host: str) -> bool:
        """Create a term if it does not exist; return whether this call did."""
        if term in self._owners:
            return False
        self._owners[term] = host
        self._newest = max(self._newest, term)
        return True

    def beat(self, term: int, number: int, successors: tuple[str, ...]) -> int:
        """Create a term's record of successors, if there is none of this number, and change the
        term's beat; return the newest term."""
        records = self._records.setdefault(term, [])
        if number == len(records) + 1:
            records.append(successors)
        self._beats[term] = self._beats.get(term, 0) + 1
        return self._newest

    def signs(self, newest: int = 0) -> TermSigns:
        """Return the signs of the newest term, or of that which was the newest one."""
        newest = newest or self._newest
        beat = self._beats.get(newest, 0)
        for term in range(newest, 0, -1):
            if records := self._records.get(term):
                return TermSigns(newest, beat, (term, len(records)), records[-1])
        return TermSigns(newest, beat, (0, 0), ())

    def request(
        self, host: str, operation: Callable[[], Answer], answer: Callable[[Answer], None]
    ) -> None:
        """Carry out an operation for a host; its request or the answer may be lost."""
        cluster, line = self._cluster, self._cluster.timeline

        def take_time(then: Callable[[], None]) -> None:
            slow = line.dice.random() < 0.03
            line.after(line.between(0.001, 0.5 if slow else 0.015), then)

        def arrive() -> None:
            if cluster.reaches(host, STORE):
                value = operation()
                take_time(lambda: answer(value) if cluster.reaches(host, STORE) else None)

        take_time(arrive)


class SimCandidate:
    """A host's watch over terms: it tells its agent of a newer one, or creates it."""

    def __init__(self, agent: SimAgent, terms: SimTermStore, node_rank: int) -> None:
        self._agent, self._terms = agent, terms
        self._cluster, self._line = agent.cluster, agent.line
        self._node_rank = node_rank
        self._signs: TermSigns | None = None
        self._since_s = self._read_s = 0.0
        self._look()

    def _look(self) -> None:
        agent, lease_s = self._agent, self._cluster.limits.lease_s
        pause_s = _LOOK_SHARE * lease_s * self._line.between(0.8, 1.2)
        self._line.after(pause_s, lambda: agent.call(self._look))
        if agent.present and self._line.now_s - agent.answered_s > SILENCE_SHARE * lease_s:
            then = partial(agent.call_alive, agent.lives, self._compare)
            self._terms.request(agent.name, self._terms.signs, then)
        else:
            self._signs = None

    def _compare(self, signs: TermSigns) -> None:
        agent, now_s, lease_s = self._agent, self._line.now_s, self._cluster.limits.lease_s
        if signs.newest > agent.obeyed:
            agent.learn(signs.newest)
        is_steady = now_s - self._read_s < SILENCE_SHARE * lease_s  # the store has answered
        self._read_s = now_s
        if signs != self._signs or not (is_steady or agent.may_create()):
            self._signs, self._since_s = signs, now_s
            return
        has_lease = agent.may_create()
        still_share = STILL_SHARE if has_lease else UNLEASED_STILL_SHARE
        patience_s = (still_share + 0.01 * self._node_rank) * lease_s
        if now_s - self._since_s > patience_s and (
            has_lease or agent.may_succeed(signs.successors)
        ):
            self._signs = None
            term = signs.newest + 1
            check = (
                partial(self._begin_with_lease, term) if has_lease else partial(self._check, signs)
            )
            self._terms.request(
                agent.name,
                partial(self._terms.create, term, agent.name),
                partial(agent.call_alive, agent.lives, check),
            )

    def _begin_with_lease(self, term: int, is_ours: bool) -> None:
        """Begin the term, unless the lease has ended meanwhile: then the term does nothing."""
        if is_ours and self._agent.may_create():
            self._prepare(term)

    def _check(self, before: TermSigns, is_ours: bool) -> None:
        """Read again after the term exists: its former owner may have struck this agent off."""
        if is_ours:
            agent, signs = self._agent, partial(self._terms.signs, before.newest)
            then = partial(
                agent.call_alive, agent.lives, partial(self._begin_without_lease, before)
            )
            self._terms.request(agent.name, signs, then)

    def _begin_without_lease(self, before: TermSigns, signs: TermSigns) -> None:
        if signs.record == before.record and self._agent.may_succeed(signs.successors):
            self._prepare(before.newest + 1)

    def _prepare(self, term: int) -> None:
        agent = self._agent
        agent.learn(term)
        agent.is_creating = True
        # Its journal is read after the term exists, and that may take long.
        slow = self._line.dice.random() < 0.1
        begin = partial(agent.call_alive, agent.lives, self._begin, term)
        self._line.after(self._line.between(0.001, 2.0 if slow else 0.1), begin)

    def _begin(self, term: int) -> None:
        self._agent.is_creating = False
        self._cluster.begin(term, self._agent)
