"""Answers to renewals: at once, or after a read of the store.

An agent is *in touch* if the newest answer that it has confirmed was sent less than IN_TOUCH of a
lease ago. It creates no term before half of a lease without an answer is over. So while all agents
are in touch, there is no newer term.

A controller is *alone* if it hears none of two or more other agents that have leases. Its own
network is the likelier cause then, also where it reaches the store.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from outlast.transport import messages

IN_TOUCH = 0.42
ALONE = 0.25  # share of the lease, as long as agents wait before they look at the beat
_LOOK = 0.02  # share of a lease for which a look at all agents holds
_UNCONFIRMED_MAX = 1000


class _AgentAnswers:
    """Answers to one connection of an agent."""

    def __init__(self) -> None:
        self.sent: deque[float] = deque(maxlen=_UNCONFIRMED_MAX)  # times, of those not confirmed
        self.confirmed = 0
        self.confirmed_s = 0.0  # when the newest confirmed one was sent


class LeaseGrants:
    """Answers of one controller, on `host`, to the renewals of its agents."""

    def __init__(
        self, host: str, lease_s: float, confirm: Callable[[Callable[[], None]], None]
    ) -> None:
        self._host, self._lease_s, self._confirm = host, lease_s, confirm
        self._heard_s = time.monotonic()  # when another host's message came
        self._agents: dict[str, _AgentAnswers] = {}
        self._look: tuple[float, bool] = (0.0, False)  # time, and whether all were in touch

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

    def answer(self, agent: str, send: Callable[[], None], agents: Iterable[str]) -> None:
        """Send an answer: at once if all of `agents` are in touch, else when that is safe."""
        one = self._agents.setdefault(agent, _AgentAnswers())
        if self._are_in_touch(agents):
            self._send(agent, one, send)
        else:
            self._confirm(partial(self._send, agent, one, send))

    def is_alone(self, agents: Iterable[str]) -> bool:
        """Return whether none of the other agents is heard; `agents`: all that have leases."""
        is_silent = time.monotonic() - self._heard_s >= ALONE * self._lease_s
        return is_silent and sum(agent != self._host for agent in agents) > 1

    def _send(self, agent: str, one: _AgentAnswers, send: Callable[[], None]) -> None:
        if self._agents[agent] is one:  # else the agent would take it for a later request's answer
            one.sent.append(time.monotonic())
            send()

    def _are_in_touch(self, agents: Iterable[str]) -> bool:
        now_s = time.monotonic()
        at_s, found = self._look
        if now_s - at_s >= _LOOK * self._lease_s:
            since_s = now_s - IN_TOUCH * self._lease_s
            names = tuple(agents)
            known = (self._agents.get(name) for name in names)
            found = bool(names) and all(one and one.confirmed_s > since_s for one in known)
            self._look = now_s, found
        return found
