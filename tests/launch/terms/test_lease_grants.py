"""Answers to renewals: at once while all agents are in touch, else after a read of the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outlast.launch.terms import lease_grants
from outlast.launch.terms.lease_grants import ALONE, IN_TOUCH, LeasedAgents, LeaseGrants
from outlast.launch.terms.term_records import SuccessorRecord
from outlast.transport import messages

LEASE_S = 10.0
AGENTS: tuple[str, ...] = ("a", "b")
HELLO = messages.AgentHello(host="h", address="h", capacity=1, lease_s=LEASE_S)


class Desk:
    """Grants under a clock of the test, answers that were sent, reads that are still to come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(lease_grants.time, "monotonic", lambda: self.now_s)
        self.reads: list[Callable[[], None]] = []
        self.sent: list[str] = []
        self.answers = dict.fromkeys(AGENTS, 0)
        self.leased = LeasedAgents(list(AGENTS), are_known=True)
        self.grants = LeaseGrants(
            "own", 1, LEASE_S, self.reads.append, lambda: self.leased, ("a", "c")
        )

    def ask(self, agent: str) -> None:
        """Renew, and confirm all answers that the agent has got."""
        body = messages.Renew(answers=self.answers[agent])
        self.grants.received(agent, body)
        self.grants.answer(agent, lambda: self._send(agent))

    def _send(self, agent: str) -> None:
        self.answers[agent] += 1
        self.sent.append(agent)

    def read(self) -> None:
        """Let the store answer."""
        reads, self.reads[:] = list(self.reads), []
        for then in reads:
            then()

    def record(self) -> tuple[str, ...]:
        """Bring the record of successors into the store; return its hosts."""
        record = self.grants.next_successors()
        assert record is not None
        self.grants.on_recorded(record)
        return record.hosts

    def touch_all(self) -> None:
        for _ in range(2):
            for agent in AGENTS:
                self.ask(agent)
            self.read()
            self.now_s += 0.5


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(monkeypatch)
    assert desk.record() == AGENTS
    return desk


def test_an_answer_waits_for_the_store_until_all_agents_are_in_touch(desk: Desk) -> None:
    desk.ask("a")
    assert not desk.sent
    desk.read()
    assert desk.sent == ["a"]
    desk.touch_all()
    desk.sent.clear()
    desk.ask("a")
    assert desk.sent == ["a"] and not desk.reads, "no read"


def test_one_silent_agent_makes_all_answers_wait(desk: Desk) -> None:
    desk.touch_all()
    desk.now_s += IN_TOUCH * LEASE_S
    desk.sent.clear()
    desk.ask("a")
    assert not desk.sent and len(desk.reads) == 1, "agent b may have created a term"


def test_an_answer_that_nobody_confirmed_proves_no_touch(desk: Desk) -> None:
    desk.touch_all()
    desk.now_s += IN_TOUCH * LEASE_S
    desk.answers["b"] = 0  # its renewals arrive, the answers to it do not
    desk.ask("b")
    desk.read()
    desk.sent.clear()
    desk.ask("a")
    assert not desk.sent


def test_a_new_connection_gets_no_answer_to_an_earlier_request(desk: Desk) -> None:
    desk.ask("a")
    desk.grants.received("a", HELLO)
    desk.read()
    assert not desk.sent


def test_a_controller_that_hears_none_of_two_others_is_alone(desk: Desk) -> None:
    desk.leased.names.append("own")
    desk.touch_all()
    assert not desk.grants.is_alone()
    desk.now_s += ALONE * LEASE_S
    desk.grants.received("own", messages.Renew())
    assert desk.grants.is_alone()
    desk.leased.names.remove("a")
    assert not desk.grants.is_alone(), "which of two is cut off cannot be known"
    desk.leased.names.remove("b")
    assert not desk.grants.is_alone(), "the leases of the others are over"
    desk.leased.names.extend(AGENTS)
    assert desk.grants.is_alone()
    desk.grants.received("b", messages.Renew())
    assert not desk.grants.is_alone()


def lose(desk: Desk, agent: str) -> None:
    """Let an agent's lease end, while that of the others is renewed by reads."""
    desk.touch_all()
    desk.now_s += LEASE_S
    desk.leased.names.remove(agent)
    for _ in range(2):
        for other in desk.leased.names:
            desk.ask(other)
        desk.read()
        desk.now_s += 0.5
    desk.sent.clear()


def test_an_agent_without_a_lease_counts_until_the_store_has_struck_it_off(desk: Desk) -> None:
    lose(desk, "b")
    desk.ask("a")
    assert not desk.sent, "agent b may create a term without a lease"
    desk.read()
    record = desk.grants.next_successors()
    assert record == SuccessorRecord(term=1, number=2, hosts=("a",))
    desk.sent.clear()
    desk.ask("a")
    assert not desk.sent, "the store may not have the record yet"
    desk.read()
    assert desk.grants.next_successors() is record, "written again until the store has it"
    desk.grants.on_recorded(record)
    desk.sent.clear()
    desk.ask("a")
    assert desk.sent == ["a"]


def test_nobody_is_answered_at_once_while_any_host_may_succeed(desk: Desk) -> None:
    desk.leased.names.clear()
    assert desk.record() == ()
    desk.leased.names.extend(AGENTS)
    desk.touch_all()
    desk.sent.clear()
    desk.ask("a")
    assert not desk.sent


def test_successors_are_inherited_until_the_agents_of_a_term_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch)
    desk.leased = LeasedAgents(["b"], are_known=False)
    assert desk.record() == ("a", "b", "c")
    desk.leased = LeasedAgents(["b"], are_known=True)
    assert desk.record() == ("b",)
    assert desk.grants.next_successors() is None
