"""Answers to renewals: at once, or after a read of the store.

An agent is *in touch* if the newest answer that it has confirmed was sent less than IN_TOUCH of a
lease ago. It creates no term before half of a lease without an answer is over. So while all agents
are in touch, there is no newer term.

*All agents* are those that have leases, and those that the store has as successors of this term:
they may create the next one without a lease. One that has lost its lease is struck off by a new
record; it counts until that record is in the store, and a read after it has found no newer term.

A controller is *alone* if it hears none of two or more other agents that have leases. Its own
network is the likelier cause then, also where it reaches the store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from outlast.launch.terms.term_records import SuccessorRecord
from outlast.transport import messages

IN_TOUCH = 0.42
ALONE = 0.25  # share of the lease, as long as agents wait before they look at the beat
_LOOK = 0.02  # share of a lease for which a look at all agents holds
_UNCONFIRMED_MAX = 1000
SUCCESSORS_MAX = 64  # hosts in a record


class _AgentAnswers:
    """Answers to one connection of an agent."""

    def __init__(self) -> None:
        self.sent: deque[float] = deque(maxlen=_UNCONFIRMED_MAX)  # times, of those not confirmed
        self.confirmed = 0
        self.confirmed_s = 0.0  # when the newest confirmed one was sent


class LeasedAgents(NamedTuple):
    """Agents that have leases of a term. `are_known`: the term waits for no others any more."""

    names: list[str]
    are_known: bool


class LeaseGrants:
    """Answers of one controller, on `host`, to the renewals of its agents in its `term`.

    `leased` returns the agents; until they are known, the successors of the former term, which are
    `inherited`, are those of this one as well.
    """

    def __init__(
        self,
        host: str,
        term: int,
        lease_s: float,
        confirm: Callable[[Callable[[], None]], None],
        leased: Callable[[], LeasedAgents],
        inherited: tuple[str, ...] = (),
    ) -> None:
        self._host, self._lease_s, self._confirm = host, lease_s, confirm
        self._leased, self._inherited = leased, inherited
        self._heard_s = time.monotonic()  # when another host's message came
        self._agents: dict[str, _AgentAnswers] = {}
        self._look: tuple[float, bool] = (0.0, False)  # time, and whether all were in touch
        self._recorded = SuccessorRecord(term=term, number=0, hosts=())
        self._recording: SuccessorRecord | None = None  # the store may have it

    def received(self, agent: str, body: messages.AnyBody) -> None:
        """Begin to count at a connection's first message; record what a renewal confirms."""
        if agent != self._host:
            self._heard_s = time.monotonic()
        if isinstance(body, messages.AgentHello):
            self._agents[agent] = _AgentAnswers()
        elif isinstance(body, messages.Renew) and (one := self._agents.get(agent)):
            while one.confirmed < body.answers and one.sent:
                one.confirmed += 1
                one.confirmed_s = one.sent.popleft()

    def answer(self, agent: str, send: Callable[[], None]) -> None:
        """Send an answer: at once if all agents are in touch, else when that is safe."""
        one = self._agents.setdefault(agent, _AgentAnswers())
        if self._are_in_touch():
            self._send(agent, one, send)
        else:
            self._confirm(partial(self._send, agent, one, send))

    def next_successors(self) -> SuccessorRecord | None:
        """Return the record of successors to be written, if these are not the present ones."""
        names, are_known = self._leased()
        names = names if are_known else {*names, *self._inherited}
        hosts, newest = tuple(sorted(names)[:SUCCESSORS_MAX]), self._recorded
        if self._recording is None and (hosts != newest.hosts or not newest.number):
            self._recording = SuccessorRecord(
                term=newest.term, number=newest.number + 1, hosts=hosts
            )
        return self._recording

    def on_recorded(self, record: SuccessorRecord) -> None:
        """Note that a record is in the store, and that no newer term existed after that."""
        self._recorded, self._recording = record, None
        self._look = (0.0, False)

    def is_alone(self) -> bool:
        """Return whether none of the other agents that have leases is heard."""
        names, are_known = self._leased()
        is_silent = time.monotonic() - self._heard_s >= ALONE * self._lease_s
        return is_silent and are_known and sum(name != self._host for name in names) > 1

    def _send(self, agent: str, one: _AgentAnswers, send: Callable[[], None]) -> None:
        if self._agents[agent] is one:  # else the agent would take it for a later request's answer
            one.sent.append(time.monotonic())
            send()

    def _are_in_touch(self) -> bool:
        now_s = time.monotonic()
        at_s, found = self._look
        if now_s - at_s >= _LOOK * self._lease_s:
            since_s = now_s - IN_TOUCH * self._lease_s
            leased, recorded = self._leased(), self._recorded.hosts
            names = set(leased.names).union(
                recorded, self._recording.hosts if self._recording else ()
            )
            known = (self._agents.get(name) for name in names)
            in_touch = all(one and one.confirmed_s > since_s for one in known)
            found = leased.are_known and bool(leased.names and recorded) and in_touch
            self._look = now_s, found
        return found
