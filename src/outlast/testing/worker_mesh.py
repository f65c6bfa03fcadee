"""Connections among simulated workers: votes, state transfers, loss of a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.transport import messages

if TYPE_CHECKING:
    from outlast.testing.simulated_cluster import SimCluster
    from outlast.testing.simulated_worker import SimWorker


class Ballot:
    """One vote on one phase: complete when every rank's yes has arrived.

    Each rank's answer travels separately.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.votes: dict[int, SimWorker] = {}
        self.complete = False


class WorkerMesh:
    """The connections of one generation."""

    def __init__(self, cluster: SimCluster, plan: messages.Connect) -> None:
        self.cluster = cluster
        self.generation = plan.generation
        self.seats = plan.seats
        self.transfers = plan.transfers
        self.members: dict[int, SimWorker] = {}
        self.states: dict[tuple[int, int], int] = {}
        self._ballots: dict[int, Ballot] = {}

    def arrive(self, worker: SimWorker) -> None:
        """Connect a member; it must own the seat."""
        if self.seats[worker.seat] != worker.name:
            self.cluster.ledger.fail(f"{worker.name} connects at rank {worker.seat} of another")
        self.members[worker.seat] = worker

    def is_complete(self) -> bool:
        """Return whether all members are connected."""
        return len(self.members) == len(self.seats)

    def ballot(self, n: int) -> Ballot:
        """Return the ballot of phase n, created on first use."""
        return self._ballots.setdefault(n, Ballot(n))

    def vote(self, worker: SimWorker) -> Ballot:
        """Vote yes on phase n+1. The answer reaches each rank at its own time, or never."""
        ballot = self.ballot(worker.n + 1)
        if ballot.complete:
            self.cluster.ledger.fail(f"{worker.name} votes twice on phase {ballot.n}")
        ballot.votes[worker.seat] = worker
        if len(ballot.votes) == len(self.seats):
            ballot.complete = True
            line = self.cluster.timeline
            for voter in ballot.votes.values():
                token = voter.token
                delay_s = line.between(0.0005, 0.03)
                line.after(delay_s, lambda voter=voter, token=token: voter.answer(token))
        return ballot

    def remove(self, worker: SimWorker) -> None:
        """Remove a dead member: its frames may still arrive, its neighbours may notice."""
        line = self.cluster.timeline
        for ballot in self._ballots.values():
            if not ballot.complete and line.dice.random() < 0.5:
                ballot.votes.pop(worker.seat, None)
        for member in self.members.values():
            if member is not worker and line.dice.random() < 0.4:
                delay_s = line.between(0.001, 0.02)
                line.after(delay_s, lambda member=member: member.peer_gone(self.generation))
