"""Audit reports of this rank, and its votes, in which replicas compare windows of their state.

    when                                what is compared             how
    first step of a generation          all                          reports; votes wait
    every later vote of a step          windows of parameters,       shares of the ballot, which
                                        optimizer state, gradients   add up to 0
    every `every` steps                 the rest (REST)              reports; nobody waits
    end of the loop, and behind it      all                          reports; the exit waits

A rank's share is the digest of its window times its weight, and the weights of a replica set add up
to 0: so one number shows to all ranks whether all sets are equal. If they are not, the phase is
refused before its first optimizer step, all ranks report the window, and the controller decides
before they vote again.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import msgspec
import xxhash

from outlast.controller.fault_spec import Where
from outlast.controller.sentinels.replay_rule import CONTRIBUTIONS
from outlast.errors import GroupError, StepRefused
from outlast.transport import messages
from outlast.worker.compute_environment import device_name
from outlast.worker.groups import GroupRegistry
from outlast.worker.state.audited_state import (
    IN_VOTES,
    REST,
    WHOLE,
    AuditedPart,
    collect,
    digest_kinds,
    digest_names,
    replica_set,
)
from outlast.worker.state.compared_windows import GRADIENTS, ComparedWindows, WindowDigests
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_status import WorkerStatus

AGAIN_S = 2.0  # interval of repeats: a report or its answer may be lost
_KEPT = 2  # audits whose names can still be requested


class AuditOwner(Protocol):
    """The worker whose state is audited, as Auditor uses it."""

    def protected_state(self) -> ProtectedState:
        """Return the protected state. Raises PhaseError if there is none yet."""
        ...

    def try_send(self, body: messages.WorkerBody) -> None:
        """Send a message to the controller; drop it if the agent is lost."""

    def report_trouble(self, error: BaseException) -> None:
        """Report a transport error, which ends this generation."""

    def reach(self, where: Where) -> None:
        """Fire injected faults that are due at `where`."""

    def note(self, text: str) -> None:
        """Add a note for the user to the run's events."""


class _ReplicaSet(msgspec.Struct, frozen=True, array_like=True):
    """Message between all ranks before the first vote of a generation that compares."""

    rank: int
    replica_set: bytes
    without: tuple[str, ...]
    has_equal_gradients: bool


class VoteComparison:
    """Windows of one rank's state in votes, and what they have covered in this generation.

    `without`: kinds that differ by design.
    """

    def __init__(
        self, protected: ProtectedState, every: int, sets: list[_ReplicaSet], rank: int
    ) -> None:
        mine = next(each for each in sets if each.rank == rank)
        ranks = [each.rank for each in sets if each.replica_set == mine.replica_set]
        factor = xxhash.xxh3_64_intdigest(mine.replica_set) | 1  # else two sets might cancel out
        self.weight = factor * (1 if rank != ranks[-1] else 1 - len(ranks))
        self.place = ranks.index(rank), len(ranks)  # among its replicas
        self.without = {kind for each in sets for kind in each.without}
        self.has_equal_gradients = any(each.has_equal_gradients for each in sets)
        self.taken: WindowDigests | None = None
        self._windows = ComparedWindows(protected, every)
        self._covered: dict[int, tuple[int, int]] = {}  # window -> the phase and step before it
        self._gradients: set[int] = set()
        self._count = 0

    def share(self, step: int) -> int:
        """Digest the windows of the step; return this rank's share of the vote."""
        if not self.weight:  # without a replica
            return 0
        self.taken = self._windows.take(step, self.without)
        return self.taken.digest * self.weight

    def won(self, n: int, step: int) -> None:
        """Record that the vote on phase n+1 was won: what it compared is equal."""
        taken, self.taken = self.taken, None
        if taken is None:
            return
        if taken.windows != self._count:
            self._count, self._covered = taken.windows, {}
        self._covered[taken.number] = n, step
        self._gradients.add(taken.gradient_number)
        if len(self._gradients) >= taken.gradient_windows and -1 not in self._gradients:
            self.has_equal_gradients = True

    def since(self) -> tuple[int, int]:
        """Return the phase and step since which all windows were equal; -1: not all compared."""
        is_covered = 0 < self._count == len(self._covered)
        return min(self._covered.values()) if is_covered else (-1, -1)


class Auditor:
    """Auditor of one worker. `every`: steps within which votes compare all of the state; 0: they
    compare nothing."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        owner: AuditOwner,
        *,
        every: int,
        patience_s: float,
    ) -> None:
        self._status, self._groups, self._owner = status, groups, owner
        self.every, self._patience_s = every, patience_s
        self._generation = 0  # newest one with an audited first step
        self._whole_n = -1  # the newest phase after which all of the state was reported
        self._is_behind_loop = False
        self._again = 0  # disputes of the phase under way
        self._votes: VoteComparison | None = None
        self._met = 0  # the generation that `_votes` is of
        self._set = b""
        self._names: dict[int, dict[str, dict[str, bytes]]] = {}  # by n
        self._pending: messages.Audited | None = None  # report without an answer
        self._answered = threading.Event()

    def completed(self, kind: str) -> None:
        """Report due digests after a complete phase."""
        status = self._status
        self._pending, self._again = None, 0
        if self._votes is not None:
            self._votes.won(status.n - 1, status.step - (kind == "step"))
        if kind == "step":
            self._owner.reach("committed")
        if self._groups.world < 2 or not status.is_open:
            return
        if kind == "eval" and self._is_behind_loop and self._generation != status.opened:
            self._generation = status.opened
            self._report(WHOLE)
        if kind != "step":
            return
        if self._generation != status.opened:
            self._generation = status.opened
            self._report(WHOLE)
        elif self.every and status.step % self.every == 0:
            self._report(REST)

    def loop_ended(self, stands: bool) -> None:
        """Report the state after the loop's last step, unless it has been reported.

        No-op in a replay walk (not `stands`), since the step may be incomplete on other ranks.
        """
        status, self._is_behind_loop = self._status, True
        if (
            not stands
            or self._groups.world < 2
            or not status.is_open
            or self._generation != status.opened
        ):
            return
        if self._whole_n != status.n:
            self._report(WHOLE)

    def finish(self) -> None:
        """Wait, with a deadline, for the answer to the report at the loop's end."""
        if report := self._overdue():
            self._owner.note(f"no answer to the audit of step {report.step}, the last one")

    def before_vote(self, compares: bool) -> int:
        """Wait for the answer that the state at the phase's start equals that of its replicas.

        Return this rank's share of a vote that `compares` their windows; 0 for none.
        """
        if self._votes is not None:
            self._votes.taken = None  # of an attempt that was refused
        if compares:
            self._owner.reach("reduced")
        if report := self._overdue():
            what = "the audit" if not report.again else "a difference after the audit"
            detail = f"no answer to {what} of step {report.step} in {self._patience_s:.0f} s"
            self._owner.report_trouble(GroupError(detail))
        return self._share() if compares else 0

    def equal_gradients(self) -> tuple[int, int]:
        """Return this rank's place among the replicas whose gradients this vote compares and
        earlier ones have found equal, and their number; (0, 1) where none are known to be."""
        votes, status = self._votes, self._status
        is_current = votes is not None and self._met == status.opened == self._generation
        if not (votes and is_current and votes.has_equal_gradients and votes.weight):
            return 0, 1
        return (0, 1) if GRADIENTS in votes.without else votes.place

    def _share(self) -> int:
        status, protected = self._status, self._owner.protected_state()
        has_votes = self.every and self._groups.world > 1 and self._generation == status.opened
        if not (has_votes and protected.local.has_replicas):
            return 0
        if self._votes is None or self._met != status.opened:
            self._meet(protected)
        assert self._votes is not None
        return self._votes.share(status.step)

    def _meet(self, protected: ProtectedState) -> None:
        """Exchange with all ranks who is whose replica, once a generation."""
        before, rank = self._votes, self._groups.seat
        mine = _ReplicaSet(
            rank,
            self._replica_set(protected),
            tuple(sorted(before.without)) if before is not None else (),
            before is not None and before.has_equal_gradients,
        )
        answers = self._groups.gather_bytes(msgspec.msgpack.encode(mine))
        sets = [msgspec.msgpack.decode(each, type=_ReplicaSet) for each in answers]
        self._votes = VoteComparison(protected, self.every, sets, rank)
        self._met = self._status.opened

    def dispute(self) -> str:
        """Find out, after a vote with unequal ballots, whether replicas differ, and report that.

        Returns why the phase is refused, "" if replicas do not differ. Collective.
        """
        votes, status = self._votes, self._status
        taken = votes.taken if votes is not None else None
        mine_set = self._replica_set(self._owner.protected_state())
        mine = mine_set, taken.digest.to_bytes(8, "little") if taken is not None else b""
        answers = self._groups.gather_bytes(msgspec.msgpack.encode(mine))
        found: dict[bytes, set[bytes]] = {}
        for each in answers:
            replicas, digest = msgspec.msgpack.decode(each, type=tuple[bytes, bytes])
            found.setdefault(replicas, set()).add(digest)
        disputed = [digests for digests in found.values() if len(digests) > 1]
        if not disputed or any(b"" in digests for digests in disputed):
            return ""
        self._again += 1
        self._names[status.n] = names = taken.names() if taken is not None else {}
        since_n, since_step = votes.since() if votes is not None else (-1, -1)
        report = messages.Audited(
            generation=status.opened,
            n=status.n,
            step=status.step,
            replica_set=mine_set,
            kinds=digest_kinds(names),
            part=IN_VOTES.number,
            parts=IN_VOTES.parts,
            again=self._again,
            since_n=since_n,
            since_step=since_step,
            device=device_name(),
            has_equal_gradients=votes is not None and votes.has_equal_gradients,
        )
        self._await(report)
        return "replicas hold different bytes"

    def report_contributions(
        self, replicas: bytes, names: dict[str, bytes], since: tuple[int, int], *, repeats: bool
    ) -> None:
        """Report the contribution of a jury (`replicas`) to the phase under way, and wait for the
        answer. `repeats`: what differs is lasting. Raises StepRefused if the generation ends."""
        status = self._status
        self._again += 1
        self._names[status.n] = {CONTRIBUTIONS: names} if names else {}
        report = messages.Audited(
            generation=status.opened,
            n=status.n,
            step=status.step,
            replica_set=replicas,
            kinds=digest_kinds(self._names[status.n]),
            part=IN_VOTES.number,
            parts=IN_VOTES.parts,
            again=self._again,
            since_n=since[0],
            since_step=since[1],
            device=device_name(),
            repeats=repeats,
        )
        self._await(report)
        self.before_vote(compares=False)
        if not status.is_open:
            raise StepRefused("a rank contributes wrong bits")

    def _overdue(self) -> messages.Audited | None:
        """Wait for an answer; return the report if none arrives in time."""
        report = self._pending
        if report is None or report.generation != self._status.opened:
            return None
        until_s = time.monotonic() + self._patience_s
        while not self._answered.wait(AGAIN_S):
            if not self._status.is_open:
                return None  # the vote will fail
            if time.monotonic() > until_s:
                return report
            self._owner.try_send(report)
        self._pending = None
        return None

    # --- the reader thread ---

    def hear(self, body: messages.AuditRequest | messages.AuditAgreed) -> None:
        """Handle the controller's request or answer."""
        if isinstance(body, messages.AuditRequest):
            names = self._names.get(body.n, {})
            request = {kind: names.get(kind, {}) for kind in body.kinds}
            self._owner.try_send(
                messages.AuditNamed(generation=body.generation, n=body.n, names=request)
            )
        elif (report := self._pending) is not None and _answers(body, report):
            if self._votes is not None:
                self._votes.without.update(body.without)
            self._answered.set()

    def wake(self) -> None:
        """Wake the main thread, since the generation has closed."""
        self._answered.set()

    def _replica_set(self, protected: ProtectedState) -> bytes:
        self._set = self._set or replica_set(protected)
        return self._set if protected.local.has_replicas else f"rank {self._groups.seat}".encode()

    def _report(self, part: AuditedPart) -> None:
        status, protected = self._status, self._owner.protected_state()
        names = digest_names(collect(protected, part))
        self._names = {n: self._names[n] for n in sorted(self._names)[1 - _KEPT :]}
        self._names[status.n] = names
        votes = self._votes if self._met == status.opened else None
        since_n, since_step = votes.since() if votes is not None else (-1, -1)
        report = messages.Audited(
            generation=status.opened,
            n=status.n,
            step=status.step,
            replica_set=self._replica_set(protected),
            kinds=digest_kinds(names),
            part=part.number,
            parts=part.parts,
            since_n=since_n,
            since_step=since_step,
        )
        if part == WHOLE:
            self._whole_n = status.n
            self._await(report)
        else:
            self._owner.try_send(report)

    def _await(self, report: messages.Audited) -> None:
        """Send a report whose answer the next vote awaits."""
        self._answered.clear()
        self._pending = report
        self._owner.try_send(report)


def _answers(body: messages.AuditAgreed, report: messages.Audited) -> bool:
    return (body.n, body.again) == (report.n, report.again)
