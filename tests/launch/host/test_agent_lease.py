"""The lease of an agent, on a clock of the test."""

from __future__ import annotations

import time

import pytest

from outlast.launch.host.agent_lease import (
    LEASE_USED,
    RENEW_S,
    USED_AT_TAKEOVER,
    AgentLease,
    boot_clock_s,
)

LEASE_S = 10.0
USABLE_S = LEASE_USED * LEASE_S


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> AgentLease:
    return AgentLease(LEASE_S, clock)


def run_on(lease: AgentLease, clock: Clock, seconds: float) -> None:
    """Let time pass while the agent runs."""
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        clock.now_s = min(until_s, clock.now_s + RENEW_S)
        lease.look()


def renew(lease: AgentLease) -> None:
    lease.begin_renewal()
    lease.sent()


def test_the_lease_counts_from_the_time_at_which_an_answered_renewal_was_sent(
    lease: AgentLease, clock: Clock
) -> None:
    renew(lease)
    run_on(lease, clock, 2.0)
    lease.answered()
    assert lease.silence_s == 2.0
    run_on(lease, clock, USABLE_S - 2.0 - RENEW_S)
    assert not lease.is_over
    run_on(lease, clock, RENEW_S)
    assert lease.is_over and not lease.in_doubt


def test_a_successor_was_answered_once_and_not_for_half_of_a_lease(
    lease: AgentLease, clock: Clock
) -> None:
    clock.now_s += 10 * LEASE_S
    assert not lease.may_succeed, "no controller knows this agent"
    lease.begin()
    lease.sent()
    lease.answered()
    assert not lease.may_succeed
    clock.now_s += LEASE_S / 2
    assert lease.may_succeed and lease.may_claim
    lease.begin()  # it has ended
    assert lease.may_succeed and not lease.may_claim


def test_an_answer_without_a_renewal_extends_nothing(lease: AgentLease, clock: Clock) -> None:
    lease.sent()
    lease.reconnected()
    run_on(lease, clock, USABLE_S)
    lease.answered()
    assert lease.is_over


def test_a_stall_within_the_lease_raises_no_doubt(lease: AgentLease, clock: Clock) -> None:
    clock.now_s += USABLE_S - 0.1
    lease.look()
    assert not lease.in_doubt and not lease.is_over and lease.is_renewal_due


def test_a_stall_beyond_the_lease_has_one_pause_for_a_new_answer(
    lease: AgentLease, clock: Clock
) -> None:
    renew(lease)
    clock.now_s += 60.0
    lease.look()
    assert lease.in_doubt and lease.stall_s == 60.0 and lease.is_renewal_due
    lease.answered()  # it was sent before the stall
    assert lease.in_doubt and lease.silence_s <= RENEW_S
    renew(lease)
    run_on(lease, clock, RENEW_S)
    assert lease.is_over
    lease.begin()
    assert not lease.in_doubt and not lease.is_over


def test_a_renewal_after_the_stall_ends_the_doubt(lease: AgentLease, clock: Clock) -> None:
    clock.now_s += 60.0
    lease.look()
    renew(lease)
    clock.now_s += 0.1
    lease.answered()
    assert not lease.in_doubt and not lease.is_over


def test_the_clock_counts_suspended_time() -> None:
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= boot_clock_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.mark.parametrize(
    ("lease_s", "hosts", "pause_s"),
    [(10.0, 1, 0.5), (10.0, 512, 0.5), (10.0, 1024, 1.0), (10.0, 4096, 1.25), (1.2, 4096, 0.2)],
)
def test_many_hosts_renew_more_rarely(
    clock: Clock, lease_s: float, hosts: int, pause_s: float
) -> None:
    lease = AgentLease(lease_s, clock, hosts)
    lease.begin_renewal()
    clock.now_s += 0.99 * pause_s
    assert not lease.is_renewal_due
    clock.now_s += 0.02 * pause_s
    assert lease.is_renewal_due


def test_a_vote_is_applied_until_the_lease_that_was_granted_last_ends(
    lease: AgentLease, clock: Clock
) -> None:
    renew(lease)
    sent_s = clock.now_s
    clock.now_s += 2.0
    lease.answered()
    assert lease.held_ns == int((sent_s + USED_AT_TAKEOVER * LEASE_S) * 1e9)
    clock.now_s += 3 * LEASE_S  # the host stood still: the doubt extends nothing
    lease.look()
    assert lease.in_doubt and lease.held_ns < clock.now_s * 1e9
