"""Phases: a function that is run, put back, and run again until one generation has completed it.

The life of an attempt: remember what it may touch (`Undo`, and the slot `before:n`) -> run the
function -> at its first optimizer step, or at its end, write the slot `after:n+1` and vote -> apply
-> check that nothing random or rank-specific changed behind the vote -> n+1 phases are complete.
Anything else ends in a put-back and another attempt, in this generation or the next.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import xxhash

from outlast.checkpoint import tree
from outlast.core.faults import Where
from outlast.errors import GroupError, PhaseError, StepRefused, UsageError
from outlast.events import Fault
from outlast.worker.gate import Gate
from outlast.worker.generators import Generator
from outlast.worker.groups import Groups, is_transport_error
from outlast.worker.healing import Healer
from outlast.worker.moment import Moment
from outlast.worker.place import LOST, Place, Walk, keep_result
from outlast.worker.protected import Protected, Undo, reset_reducers
from outlast.worker.timeline import Timeline

Kind = Literal["step", "eval", "checkpoint", "epoch", "draw"]
_KIND_CODES: dict[str, int] = {"step": 1, "eval": 2, "checkpoint": 3, "epoch": 4, "draw": 5}
REHEARSALS = 2
POSITION_BYTES_NOTED = 1 << 20


@dataclasses.dataclass
class Attempt:
    """One try at one phase."""

    kind: Kind
    key: str
    undo: Undo
    begin_ns: int
    vote_ns: int = 0
    choices: bytes = b""  # what the script had drawn and changed when it voted
    dry: bool = False
    rehearsed: bool = False  # refused at its gate because this function is new here
    reports: dict[str, float] = dataclasses.field(default_factory=dict)


class Phases:
    """Runs phases for one worker. `watch` is called at named points (fault injection)."""

    def __init__(
        self, *, moment: Moment, groups: Groups, healer: Healer, timeline: Timeline,
        place: Place, put_slot: Callable[[Any, int, bytes], None], watch: Callable[[Where], None],
        alone: bool,
    ) -> None:  # fmt: skip
        self._moment, self._groups, self._healer = moment, groups, healer
        self._timeline, self._place, self._put_slot = timeline, place, put_slot
        self._watch, self._alone = watch, alone
        self.protected: Protected | None = None
        self.gate = Gate(self._is_protected)
        self.walk: Walk | None = None
        self.result_lost = False  # the script holds a dry run's result until the walk is over
        self.settled: set[str] = set()  # functions whose gate this process has rehearsed
        self.gated_elsewhere: set[str] = set()  # ... and the workers before this one
        self.on_settled: Callable[[], None] = lambda: None
        self.drain: Callable[[], None] = lambda: None
        self.attempt: Attempt | None = None
        self._rehearsals: dict[str, int] = {}
        self._before_n = -1
        self._large_noted = False

    def _is_protected(self, optimizer: Any) -> bool:
        held = self.protected.optimizers.values() if self.protected else ()
        return any(optimizer is o for o in held)

    @property
    def is_real(self) -> bool:
        """False in dry runs and rehearsals."""
        return not (self._moment.rehearsing or (self.attempt is not None and self.attempt.dry))

    def generators(self) -> dict[str, Generator]:
        return self.protected.generators if self.protected else {}

    # --- one phase ---

    def run(self, call: Callable[[], Any], *, key: str, kind: Kind) -> Any:
        """Run `call` as the next phase; returns what it returned in the generation that has it."""
        if self.attempt is not None:
            raise PhaseError(f"session.run inside session.run ({key} inside {self.attempt.key})")
        assert self.protected is not None
        self.protected.check_unchanged()
        self.gate.guarding = True
        self._groups.start_phases()
        if self.walk is not None:
            replayed = self._replay(call, key, kind)
            if replayed is not None:
                return replayed[0]
        while True:
            self._stand()
            self._catch_up(call, key, kind)
            try:
                return self._try(call, key, kind)
            except _Again:
                continue

    def _stand(self) -> None:
        """Return inside an open generation, before phase n+1."""
        if self.walk is not None:
            self.join()
        while not self._moment.is_open:
            self._heal()
        if self._moment.draining:
            self.drain()

    def _heal(self) -> None:
        self._healer.heal()
        self._timeline.generation = self._moment.opened

    def _try(self, call: Callable[[], Any], key: str, kind: Kind) -> Any:
        moment, protected = self._moment, self.protected
        assert protected is not None
        attempt = Attempt(kind, key, Undo(protected), self._timeline.now_ns())
        self._write_before(attempt)
        moment.rehearsing = not self._alone and self._is_rehearsal(key, kind)
        try:
            if kind == "checkpoint":
                moment.enter_attempt("checkpoint")
            else:
                moment.enter_attempt("dry" if moment.rehearsing else "running")
        except StepRefused:
            raise _Again from None
        self.attempt, self.gate.ask = attempt, self._ask
        try:
            with self._groups.phase():
                result = call()
                if not attempt.vote_ns:
                    self._no_gradient_left(attempt)
                    self._vote(attempt)
                self._after_vote(attempt)
        except StepRefused as refused:
            self._refused(attempt, str(refused))
            raise _Again from None
        except Exception as error:  # noqa: BLE001 - classified below; nothing is swallowed
            self._failed(attempt, error)
            raise _Again from None
        finally:
            self.attempt, self.gate.ask = None, None
            moment.rehearsing = False
        self._watch("done")
        self._complete(attempt, result)
        return result

    def _write_before(self, attempt: Attempt) -> None:
        n = self._moment.n
        if self._before_n != n:
            own = attempt.undo.own_bytes
            slot = self._place.slot(n, self._moment.step, own).pack()
            if len(slot) > POSITION_BYTES_NOTED and not self._large_noted:
                self._large_noted = True
                self._timeline.note(
                    f"this rank's own state and data position take {len(slot)} bytes"
                    f" ({len(own)} of them state) and are written down twice a phase"
                )
            self._put_slot("before", n, slot)
            self._before_n = n

    # --- the vote ---

    def _ask(self) -> None:
        """A protected optimizer wants to step: returns when the phase is won, raises otherwise."""
        attempt = self.attempt
        assert attempt is not None
        if attempt.vote_ns:
            return
        if attempt.dry:
            attempt.vote_ns = self._timeline.now_ns()
            return
        if not self._alone and attempt.key not in self.settled:
            self._rehearsals[attempt.key] = self._rehearsals.get(attempt.key, 0) + 1
            attempt.rehearsed = True
            raise StepRefused("rehearsal")
        self._vote(attempt)

    def _is_rehearsal(self, key: str, kind: Kind) -> bool:
        return key not in self.settled and (kind == "step" or key in self._rehearsals)

    def _vote(self, attempt: Attempt) -> None:
        """Returns when phase n+1 is won. Raises StepRefused; PhaseError for a broken contract."""
        assert self.protected is not None
        if pending := self._groups.unfinished():
            raise PhaseError(
                f"{pending} asynchronous collectives of {attempt.key} were not waited for before"
                " optimizer.step: their results would be applied on some ranks only"
            )
        moment, n = self._moment, self._moment.n + 1
        attempt.choices = tree.encode(self.protected.own_choices())
        own = tree.encode(self.protected.own_state())
        slot = self._place.slot(n, self._step_after(attempt), own, reports=attempt.reports)
        self._put_slot("after", n, slot.pack())
        words = [1, moment.generation, n, _KIND_CODES[attempt.kind],
                 xxhash.xxh32_intdigest(attempt.key.encode()) >> 8]  # fmt: skip
        moment.enter_attempt("voting")
        self._watch("vote")
        try:
            sums = self._groups.vote(words)
        except (GroupError, StepRefused) as error:
            self._undecided(error)
        else:
            world = sums[0]
            if sums != [world * word for word in words] or world != self._groups.world:
                moment.enter("running")
                raise PhaseError(
                    f"the ranks do not stand in the same phase: this one votes on phase {n}"
                    f" ({attempt.key}, {attempt.kind}); every rank must make the same calls of"
                    " session.run in the same order"
                )
        moment.enter("applying")
        self._groups.seal()
        self.protected.buffers.mark_vote()
        attempt.vote_ns = self._timeline.now_ns()

    def _no_gradient_left(self, attempt: Attempt) -> None:
        assert self.protected is not None
        if attempt.undo.new_gradients() and not self.protected.has_scaler:
            raise PhaseError(
                f"{attempt.key} computed gradients and no protected optimizer stepped: they would"
                " leak into the next phase; step, or clear them before the function returns"
            )

    def _undecided(self, error: BaseException) -> None:
        fault = self._fault(error, "transport")
        self._moment.prepared(fault)
        if self._healer.verdict() == "redo":
            self._moment.enter("running")
            raise StepRefused("the vote's answer was lost and nobody has applied")

    def _after_vote(self, attempt: Attempt) -> None:
        if attempt.dry:
            return
        assert self.protected is not None
        self.protected.buffers.mark_end()
        if tree.encode(self.protected.own_choices()) != attempt.choices:
            raise PhaseError(
                f"{attempt.key} drew random numbers or changed a rank-specific object after"
                " optimizer.step: a replacement worker could not know it; do it before the step or"
                " between phases (or wrap an object that is equal on all ranks in"
                " outlast.Replicated)"
            )
        left = self._groups.unfinished()
        if left:
            raise PhaseError(f"{left} collectives of {attempt.key} are still pending at its end")

    def _step_after(self, attempt: Attempt) -> int:
        return self._moment.step + (attempt.kind == "step")

    def _complete(self, attempt: Attempt, result: Any) -> None:
        moment, n, step = self._moment, self._moment.n + 1, self._step_after(attempt)
        kept = keep_result(result)
        if kept != LOST:
            self._put_slot("result", n, kept)
        self._place.add(kept)
        self._timeline.phase(n, step, attempt.kind, attempt.begin_ns, attempt.vote_ns)
        self._timeline.metrics(step, attempt.reports)
        moment.loss = attempt.reports.get("loss", moment.loss)
        moment.completed(
            step=step, result=kept, shared=attempt.kind in ("epoch", "draw", "checkpoint")
        )

    # --- what did not work ---

    def _refused(self, attempt: Attempt, reason: str) -> None:
        self._timeline.refused(
            self._moment.n + 1, self._step_after(attempt), attempt.kind, attempt.begin_ns, reason
        )
        if attempt.vote_ns:
            self._retire(GroupError(reason), "torn")
        if why := attempt.undo.put_back():
            self._retire(GroupError(why), "broken")
        if self._rehearsals.get(attempt.key) == REHEARSALS and attempt.key not in self.settled:
            self.settled.add(attempt.key)
            self.on_settled()
        self._moment.enter("idle")

    def _failed(self, attempt: Attempt, error: Exception) -> None:
        if self._alone:
            raise error
        if attempt.vote_ns:
            self._retire(error, "torn")
        self._moment.enter("running")  # an error before the vote was cast: nothing is undecided
        if self._moment.is_open:
            kind = "transport" if is_transport_error(error) else "raised"
            if isinstance(error, UsageError) and kind == "raised":
                kind = "contract"
            self._moment.trouble(self._fault(error, kind))
        self._refused(attempt, f"{type(error).__name__}: {error}"[:500])

    def _retire(self, error: BaseException, state: str) -> None:
        """This process cannot go on: say so, and wait to be replaced."""
        if self._alone:
            raise error
        fault = self._fault(error, "contract" if isinstance(error, UsageError) else "torn")
        self._moment.lost(state, fault)
        while True:  # the controller has us killed; its deadline bounds this wait
            self._moment.take(self._healer.patience_s)

    def _fault(self, error: BaseException, kind: Any) -> Fault:
        text = "".join(traceback.format_exception(error)) if kind != "transport" else ""
        return Fault(
            kind=kind, detail=f"{type(error).__name__}: {error}"[:2000], traceback=text[-8000:],
            seat=self._healer.seat, n=self._moment.n, step=self._moment.step + 1,
            t_ns=time.time_ns(),
        )  # fmt: skip

    # --- walking and joining ---

    def _replay(self, call: Callable[[], Any], key: str, kind: Kind) -> tuple[Any] | None:
        walk = self.walk
        assert walk is not None and self.protected is not None
        found = walk.next()
        if found is None:
            self._dry_runs(call, key, kind)
            return None
        kept, last = found
        value = self._dry_runs(call, key, kind)
        if kept != LOST:
            value = tree.decode(kept)
        elif kind in ("step", "eval"):
            self.result_lost = True
            self._timeline.note(
                f"what {key} returned before this worker took the seat was lost with the worker"
                " that knew it; the script here sees a dry run's result instead"
            )
        self._place.add(kept)
        self._moment.step += kind == "step"
        if last and walk.after:
            self.restore_walked()
            self._timeline.metrics(self._moment.step, walk.slot.reports)
        return (value,)

    def _dry_runs(self, call: Callable[[], Any], key: str, kind: Kind) -> Any:
        """Settle kernels, allocators, compilers and DDP's buckets without the others."""
        if key not in self.gated_elsewhere or key in self.settled:
            return None
        assert self.protected is not None
        result = None
        self._moment.enter("dry")
        for _ in range(REHEARSALS):
            attempt = Attempt(kind, key, Undo(self.protected), self._timeline.now_ns(), dry=True)
            self.attempt, self.gate.ask = attempt, self._ask
            try:
                with self._groups.phase(), self._groups.dry():
                    result = call()
            finally:
                self.attempt, self.gate.ask = None, None
                attempt.undo.put_back()
        self.settled.add(key)
        return result

    def _catch_up(self, call: Callable[[], Any], key: str, kind: Kind) -> None:
        """A joiner that joined between two steps meets the step's function only now, connected:
        its dry steps come here, and its reducers then stand where the others' were opened."""
        if key not in self.gated_elsewhere or key in self.settled:
            return
        if self.settled:
            self.settled.add(key)  # the reducers are settled; a second function shares them
            return
        assert self.protected is not None
        self._dry_runs(call, key, kind)
        reset_reducers(self.protected)

    def join(self) -> None:
        """The walk is over: take over state and stand where the others stand."""
        walk = self.walk
        assert walk is not None and self.protected is not None
        while not self._moment.is_open:
            self._heal()
        if not walk.after and not walk.slot.at_draw:
            self.restore_walked()
        self.walk, self.result_lost = None, False

    def restore_walked(self) -> None:
        """Put the seat's own state back, at the point of the walk where it was taken."""
        assert self.walk is not None and self.protected is not None
        self.protected.restore_own(tree.decode(self.walk.slot.own))


class _Again(Exception):  # noqa: N818 - control flow inside this file
    """The attempt is put back; try again where the membership says."""
