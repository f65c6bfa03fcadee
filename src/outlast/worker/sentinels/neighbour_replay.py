"""Sentinel for wrong bits before the reduction, which reach all replicas alike: a rank computes the
step of another rank again, and both compare what they give to the reductions.

    attempt            this rank                                       all ranks
    1, recorded        runs its batch; its collectives are on a tape   refused at the vote
    between attempts   runs the batch of the rank before it in the     results are gathered; a jury
                       ring, answered from its own tape                where they differ
    2                  runs its batch                                  it counts

Nothing of attempt 1 and of the replay is applied, and all of it is put back. The second attempt's
contribution is compared with the first one's; where it differs, all ranks run the phase once more.
The rule for rings and verdicts is controller/sentinels/replay_rule.py.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from outlast import events
from outlast.controller.sentinels.replay_rule import (
    FIRST_STEP,
    ReplayResult,
    ReplayStanding,
    ReplayVerdict,
    ReplayWord,
    decide,
    describe,
    disputed,
    jury,
    ring_of,
    rings,
)
from outlast.errors import CodecError, CorruptionError, GroupError, StepRefused
from outlast.events import FaultKind
from outlast.worker.compute_environment import device_name
from outlast.worker.groups import GroupRegistry
from outlast.worker.phases.phase_attempt import PhaseAttempt
from outlast.worker.sentinels.collective_tape import CollectiveTape
from outlast.worker.sentinels.replayed_inputs import (
    InputReplayer,
    decode_inputs,
    encode_inputs,
    why_unfit,
)
from outlast.worker.state.audited_state import replica_set
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_status import WorkerStatus

CHECK = "corruption"


class ReplayOwner(Protocol):
    """The phase runner, as the sentinel uses it."""

    def protected_state(self) -> ProtectedState:
        """Return the protected state."""
        ...

    @property
    def joining(self) -> InputReplayer:
        """Return what runs functions apart from attempts."""
        ...

    def report_fault(self, detail: str, kind: FaultKind, *, repeats: bool = False) -> None:
        """Report a fault that closes this generation."""


@dataclasses.dataclass
class _Record:
    """A recorded attempt of this rank. `place`: its generation, and the phases before it."""

    place: tuple[int, int]
    key: str
    own: bytes
    tape: CollectiveTape
    is_examined: bool = False
    is_equal: bool = False  # to what other ranks computed


class NeighbourReplay:
    """Replays of one worker. `every`: committed steps between rounds; 0: none."""

    def __init__(
        self,
        status: WorkerStatus,
        groups: GroupRegistry,
        timeline: WorkerEvents,
        owner: ReplayOwner,
    ) -> None:
        self._status, self._groups, self._timeline = status, groups, timeline
        self._owner = owner
        self._every = 0
        self._report: Callable[..., None] = lambda *_args, **_kwargs: None
        self.standing = ReplayStanding()
        self._tape: CollectiveTape | None = None  # of the attempt under way
        self._record: _Record | None = None
        self._proved: set[str] = set()  # functions that were equal in a replay with this worker
        self._since = -1, -1  # phases and steps before the newest equal round
        self._has_differed = False
        self._suspect = -1  # rank that gave its place to a new worker, which is replayed at once

    def configure(self, every: int, report: Callable[..., None]) -> None:
        """Take the interval, and how a jury's results are reported to the controller."""
        self._every, self._report = every, report

    def learn(self, standing: ReplayStanding) -> None:
        """Take the standing of a rank of a new generation."""
        mine = self.standing
        newest = max(mine, standing, key=lambda each: (each.n, each.step))
        without = tuple(sorted({*mine.without, *standing.without}))
        self.standing = msgspec.structs.replace(newest, without=without)

    # --- attempts ---

    @contextmanager
    def attempt(self, attempt: PhaseAttempt) -> Iterator[None]:
        """Record one attempt, if it is due; and the one behind it, to compare both."""
        self._tape, self._has_differed = None, False
        if self._record is not None and self._record.place != self._place():
            self._record = None
        if not (self._is_due(attempt) or self._is_recorded(attempt)):
            yield
            return
        self._tape = CollectiveTape(self._timeline.seat, keeps=self._record is None)
        self._tape.why = why_unfit(self._owner.protected_state())
        if self._tape.why:
            yield
            return
        with self._tape.running(self._groups, self._owner.protected_state()):
            yield

    def _place(self) -> tuple[int, int]:
        return self._status.opened, self._status.n

    def _is_due(self, attempt: PhaseAttempt) -> bool:
        if not self._every or attempt.kind != "step" or attempt.has_copy:
            return False
        if attempt.dry or attempt.replayed or self._status.rehearsing or self._groups.world < 2:
            return False
        presence, step, known = self._groups.presence, self._status.step + 1, self.standing
        if presence.absent or presence.idle or attempt.key in known.without:
            return False
        due = known.step + self._every if known.step else FIRST_STEP
        return known.n != self._status.n and step >= due

    def _is_recorded(self, attempt: PhaseAttempt) -> bool:
        record = self._record
        is_real = attempt.kind == "step" and not (attempt.dry or attempt.replayed)
        return is_real and record is not None and record.place == self._place()

    def record(self, attempt: PhaseAttempt) -> None:
        """Keep the tape of an attempt that is about to vote. Raises StepRefused, on all ranks, if
        it is to be replayed; notes a difference from the kept one otherwise."""
        tape, self._tape, self._groups.tape = self._tape, None, None
        if tape is None:
            return
        if self._is_recorded(attempt):
            self._compare(tape)
            return
        self._record = _Record(self._place(), attempt.key, attempt.undo.own_bytes, tape)
        now = ReplayStanding(self._status.n, self._status.step + 1, self.standing.without)
        self.standing = now
        attempt.disputed = True  # checked as before a vote
        raise StepRefused("recorded, for a replay on another rank")

    def _compare(self, tape: CollectiveTape) -> None:
        record, self._record = self._record, None
        assert record is not None
        if tape.why or not record.is_equal:
            return
        is_own, name = tape.first_difference(record.tape)
        self._has_differed = bool(name)
        if not is_own:  # no difference, or another rank's
            return
        self._write_transient(f"its contributions differ: {name}")

    def _write_transient(self, text: str) -> None:
        """Write that this rank was transiently wrong."""
        step, rank = self._status.step + 1, self._timeline.seat
        self._timeline.emit(
            events.Warned(
                t_ns=self._timeline.now_ns(),
                host=platform.node(),
                check=CHECK,
                symptom="other",
                severity="warn",
                code="transient",
                device=device_name() or f"rank {rank}",
                detail=f"rank {rank} ({self._timeline.worker}) computed step {step} twice, from the"
                f" same batch and state, and {text}; none was applied, and the step is redone",
                worker=self._timeline.worker,
            )
        )

    def ballot(self) -> str:
        """Return what this rank's ballot has besides the place."""
        return f" contributes otherwise, rank {self._timeline.seat}" if self._has_differed else ""

    # --- between two attempts ---

    def examine(self, call: Callable[[], Any], key: str) -> bool:
        """Replay the recorded attempts of all ranks, each on another one. Return False if this
        generation ended meanwhile."""
        record = self._record
        if record is None or record.is_examined or record.place != self._place():
            return True
        record.is_examined = True
        try:
            self._examine(record, call, key)
        except (GroupError, StepRefused) as error:
            self._owner.report_fault(str(error), "transport")
            return False
        return True

    def _examine(self, record: _Record, call: Callable[[], Any], key: str) -> None:
        protected, rank = self._owner.protected_state(), self._timeline.seat
        unfit, inputs = record.tape.why, b""
        if not unfit:
            unfit, inputs = encode_inputs(call, record.own)
        mine = ReplayWord(
            rank=rank,
            replica_set=replica_set(protected),
            host=platform.node(),
            unfit=unfit,
            is_proved=key in self._proved,
            since_n=self._since[0],
            since_step=self._since[1],
        )
        words = {word.rank: word for word in self._gather(mine, ReplayWord)}
        found = rings(words.values())
        if not found:
            why = next((f"rank {w.rank}: {w.unfit}" for w in words.values() if w.unfit), "")
            self._leave_out(key, why or "no two ranks are replicas of each other", min(words))
            return
        ring = ring_of(rank, found)
        result = ReplayResult(rank)
        theirs = b""
        if ring:
            theirs = self._groups.controls().swap(inputs, ring[1], ring[-1])
            replayed, why = self._replay(record, call, theirs, ring[-1])
            digest = b"" if why else replayed.digest()
            result = ReplayResult(rank, record.tape.digest(), digest, why)
        else:
            replayed = record.tape
        results = {each.rank: each for each in self._gather(result, ReplayResult)}
        failed = next((each for each in results.values() if each.unfit), None)
        if failed is not None:
            self._leave_out(key, f"rank {failed.rank}: {failed.unfit}", min(words))
            return
        subjects = {one: disputed(one, results) for one in found}
        if all(subject < 0 for subject in subjects.values()):
            record.is_equal = bool(ring)
            self._agree(key, found, words, ring)
            return
        for one, subject in subjects.items():
            if subject >= 0:
                jurors = jury(one, subject)
                first = {subject: record.tape, jurors[1]: replayed}
                trial = _Trial(record, call, key, jurors, first.get(rank), words)
                if self._try(trial, inputs, theirs, results):
                    return

    def _replay(
        self, record: _Record, call: Callable[[], Any], inputs: bytes, subject: int
    ) -> tuple[CollectiveTape, str]:
        tape = CollectiveTape(subject, record.tape)
        try:
            replayed, own = decode_inputs(call, inputs)
        except (CodecError, CorruptionError) as error:
            return tape, f"its inputs cannot be read ({error})"
        return tape, self._owner.joining.replay_inputs(replayed, record.key, own, tape)

    def _agree(
        self,
        key: str,
        found: Sequence[tuple[int, ...]],
        words: Mapping[int, ReplayWord],
        ring: tuple[int, ...],
    ) -> None:
        """Note an equal round."""
        self._suspect = -1
        if ring:
            self._proved.add(key)
            self._since = self._status.n, self._status.step
        members = [rank for one in found for rank in one]
        if self._timeline.seat == min(words) and not any(w.is_proved for w in words.values()):
            self._timeline.note(
                f"step {self._status.step + 1} of {len(members)} ranks was replayed, each on"
                f" another rank, with equal contributions ({key}); again every {self._every} steps",
                warning=False,
            )
        for word in words.values():
            if word.unfit and self._timeline.seat == min(words):
                self._timeline.note_once(
                    f"{key} is not replayed on other ranks for rank {word.rank}: {word.unfit}",
                    f"unfit {key}",
                )

    def _leave_out(self, key: str, why: str, reporter: int) -> None:
        """Replay a function no more, on no rank."""
        without = tuple(sorted({*self.standing.without, key}))
        self.standing = msgspec.structs.replace(self.standing, without=without)
        if self._timeline.seat == reporter:
            self._timeline.note_once(
                f"{key} is not replayed on other ranks any more, so that wrong bits before its"
                f" reductions are not found: {why}",
                f"left out {key}",
            )

    # --- a difference ---

    def _try(
        self, trial: _Trial, inputs: bytes, theirs: bytes, results: Mapping[int, ReplayResult]
    ) -> bool:
        """Let a jury decide who is wrong, and act on it; return whether something was reported."""
        rank, jurors = self._timeline.seat, trial.jurors
        subject, control = jurors[0], self._groups.controls()
        tape = CollectiveTape(subject, trial.record.tape)
        if rank == subject:
            for juror in jurors[2:]:
                control.swap(inputs, juror, -1)
            theirs = inputs
        elif rank in jurors[2:]:
            theirs = control.swap(b"", -1, subject)
        second = b""
        if rank in jurors:
            tape, why = self._replay(trial.record, trial.call, theirs, subject)
            second = b"" if why else tape.digest()
        answers = self._gather((rank, second), tuple[int, bytes])
        seconds = {each: digest for each, digest in answers if each in jurors}
        firsts = {subject: results[subject].own, jurors[1]: results[jurors[1]].replayed}
        proved = [each for each, word in trial.words.items() if word.is_proved]
        verdict = decide(jurors, firsts, seconds, proved)
        if verdict.outcome == "transient" and len(jurors) == 2:  # the controller needs a majority
            if rank in verdict.wrong:
                self._write_transient("the first of the two results was wrong")
            return False
        if (
            verdict.outcome == "lasting"
        ):  # the next attempt is replayed, too: does it follow the rank?
            self._suspect = verdict.wrong[0]
            begin = max(0, self._status.step + 1 - self._every)
            self.standing = msgspec.structs.replace(self.standing, n=-1, step=begin)
        if verdict.outcome in ("transient", "lasting"):
            self._report_verdict(trial, verdict, tape, seconds)
            return True
        why = describe(verdict, jurors, self._status.step + 1)
        if self._suspect in verdict.wrong:
            why += (
                f"; a new worker of rank {self._suspect} gives the same, so that no device is wrong"
            )
        others = trial.words.keys() - {*verdict.wrong}
        self._leave_out(trial.key, why, min(others, default=subject))
        return False

    def _report_verdict(
        self,
        trial: _Trial,
        verdict: ReplayVerdict,
        tape: CollectiveTape,
        seconds: Mapping[int, bytes],
    ) -> None:
        """Report what counts of this rank to the controller, and wait for its answer."""
        rank, names = self._timeline.seat, dict[str, bytes]()
        replicas = f"rank {rank}".encode()
        if rank in trial.jurors:
            replicas = f"replay of rank {trial.jurors[0]}".encode()
            is_second = trial.first is None or verdict.digests[rank] == seconds[rank]
            counted = tape if is_second else trial.first
            names = counted.names() if counted is not None else {}
        ring = [word for word in trial.words.values() if word.rank in trial.jurors]
        newest = max(ring, key=lambda word: word.since_n)
        since = newest.since_n, newest.since_step
        self._report(replicas, names, since, repeats=verdict.outcome == "lasting")

    def _gather(self, mine: Any, kind: Any) -> list[Any]:
        answers = self._groups.gather_bytes(msgspec.msgpack.encode(mine))
        return [msgspec.msgpack.decode(each, type=kind) for each in answers]


@dataclasses.dataclass
class _Trial:
    """A disputed contribution. `first`: this rank's tape of it, if it has one."""

    record: _Record
    call: Callable[[], Any]
    key: str
    jurors: tuple[int, ...]
    first: CollectiveTape | None
    words: Mapping[int, ReplayWord]
