"""Lease under which an agent runs workers, on the clock of its own host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

RENEW_S = 0.5  # maximum period of renewals, whose beats are displayed; of up to HOSTS_OFTEN hosts
HOSTS_OFTEN = 512  # more hosts renew more rarely: a renewal costs the controller 50 us
PERIODS = 6  # of renewals in a lease, at least
LEASE_USED = 0.75  # workers are killed after this share of the lease, well before it ends
USED_AT_TAKEOVER = 0.95  # time to meet a newer term's controller; then no vote is applied
UNANSWERED_MAX = 1000


def renewal_period_s(lease_s: float, hosts: int) -> float:
    """Return the time between two renewals of an agent, in seconds."""
    often_s = min(lease_s / PERIODS, RENEW_S)
    return max(often_s, min(lease_s / 8, RENEW_S * hosts / HOSTS_OFTEN))


def boot_clock_s() -> float:
    """Return the time of a clock that runs on while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgentLease:
    """Lease of an agent, counted from the time at which the newest answered renewal was sent.

    If the process was stopped or suspended beyond the end of the lease, the lease is `in_doubt` for
    one pause, in which the controller may renew it: workers must not run until then.

        share of the lease      0 ────────── 1/4 ──────────── 1/2 ──────────── 3/4 ─────── 19/20
        no answer is received   │ usual       │ the term's     │ may create     │ workers    │
                                │             │ beat is read   │ the next term  │ are killed │
        a newer term was seen   │                                              ... here instead
    """

    def __init__(
        self, lease_s: float, clock: Callable[[], float] = boot_clock_s, hosts: int = 1
    ) -> None:
        self.lease_s = lease_s
        self.usable_s = LEASE_USED * lease_s
        self.answers = 0  # on this connection
        self._is_granted = False  # an answer was received, and not since a stall or an end
        self._received_s = 0.0  # when the newest answer was received
        self.in_doubt = False
        self.held_ns = 0  # end of the newest lease that a controller has granted
        self.stall_s = 0.0  # time without running from which the doubt comes
        self._pause_s = renewal_period_s(lease_s, hosts)
        self._clock = clock
        self._unanswered: deque[float] = deque(maxlen=UNANSWERED_MAX)  # times of sending
        self._from_s = self._answered_s = self._looked_s = self._renewed_s = clock()
        self._woken_s = 0.0

    @property
    def silence_s(self) -> float:
        """Return how long the controller has not answered while this process ran, in seconds."""
        return self._clock() - self._answered_s

    @property
    def unheard_s(self) -> float:
        """Return for how long no answer was received, in seconds."""
        return self._clock() - self._received_s if self._received_s else 0.0

    @property
    def may_claim(self) -> bool:
        """Return whether the agent may create a term, as far as its lease is concerned."""
        return self._is_granted and self.unheard_s >= self.lease_s / 2 and not self.is_over

    @property
    def may_succeed(self) -> bool:
        """Return whether the agent may create a term as a successor, with or without a lease."""
        return self._received_s > 0.0 and self.unheard_s >= self.lease_s / 2

    @property
    def is_over(self) -> bool:
        """Return whether the workers must be killed now."""
        return self._clock() >= self._from_s + self.usable_s

    @property
    def is_renewal_due(self) -> bool:
        """Return whether a renewal should be sent."""
        return self._clock() >= self._renewed_s + self._pause_s

    @property
    def rest_s(self) -> float:
        """Return the time until a renewal is due or the lease is over, in seconds."""
        return min(self._renewed_s + self._pause_s, self._from_s + self.usable_s) - self._clock()

    def look(self) -> None:
        """Note that this process runs; called at least once a pause."""
        now_s = self._clock()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if gap_s <= self._pause_s + self.lease_s / 3:
            return
        self._answered_s += gap_s
        self._is_granted = False
        if now_s >= self._from_s + self.usable_s:
            self.in_doubt = True
            self.stall_s, self._woken_s = gap_s, now_s
        self._from_s = max(self._from_s, now_s - self.usable_s + self._pause_s)
        self._renewed_s = now_s - self._pause_s

    def begin_renewal(self) -> None:
        """Note that a renewal is due now, whether or not it can be sent."""
        self._renewed_s = self._clock()

    def sent(self) -> None:
        """Note that a renewal is being sent."""
        self._unanswered.append(self._clock())

    def answered(self) -> None:
        """Extend the lease by the answer to the oldest renewal."""
        self.answers += 1
        if not self._unanswered:
            return
        sent_s = self._unanswered.popleft()
        self._from_s = max(self._from_s, sent_s)
        self._received_s, self._is_granted = self._clock(), True
        self.usable_s = LEASE_USED * self.lease_s
        self._answered_s = max(self._answered_s, sent_s)
        self.in_doubt = self.in_doubt and sent_s < self._woken_s
        self.held_ns = max(self.held_ns, int((sent_s + USED_AT_TAKEOVER * self.lease_s) * 1e9))

    def reconnected(self) -> None:
        """Drop renewals that a former connection has lost."""
        self.answers = 0
        self._unanswered.clear()

    def begin(self) -> None:
        """Begin a new lease, without workers."""
        self._unanswered.clear()
        self.in_doubt = self._is_granted = False
        self.usable_s = LEASE_USED * self.lease_s
        self._from_s = self._clock()

    def saw_newer_term(self) -> None:
        """Give the workers time to meet the controller of a newer term, until the next answer."""
        self.usable_s = USED_AT_TAKEOVER * self.lease_s
