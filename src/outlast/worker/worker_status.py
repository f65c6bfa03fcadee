"""Status of this worker, shared by its main thread and its reader thread.

The main thread changes states; the reader thread must answer a Close at once and only once. One
lock guards both, so an answer "running" means that this attempt can no longer vote, and a voting
worker answers only once the vote's outcome is known. After a won vote the worker has `APPLIED_S` to
complete the phase, so that its result goes with the answer. Otherwise the answer is "applying":
phase n+1 will be complete here.

A third thread, the pulse, reports whether the main thread, while it stands still, waits for other
ranks. Standing still inside a collective depends on other ranks; standing still outside one is an
upload, a rollout, a sleep, or a hang. From outside the process both look alike. The interpreter
must run for the pulse to run: a pulse that has stopped in a live process means that a C extension
holds the interpreter.

| thread      | writes                                         | by                                |
|-------------|------------------------------------------------|-----------------------------------|
| main        | state, n, step, results                        | `enter`, `won`, `completed`, ...  |
| reader      | generation, closed; answers a Close            | `close`                           |
| grace timer | the answer to a Close, once a vote is won      | `answer_if_won`                   |
| pulse       | the page's pulse, without the lock             | `PulseThread`                     |

| state at Close                | answer                                                       |
|-------------------------------|--------------------------------------------------------------|
| setup, in an open generation  | broken                                                       |
| running, checkpoint, dry      | running; broken during a rehearsal with all ranks            |
| voting                        | none, until the outcome of the vote is known                 |
| applying                      | idle if the phase completes within `APPLIED_S`, else applying |
| others                        | joining, finished or idle                                    |
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from outlast.errors import GaveUpError, GroupError, StepRefused
from outlast.events import Fault, FaultKind
from outlast.transport import messages, worker_page
from outlast.transport.connection_errors import host_of, silent_hosts
from outlast.transport.worker_page import KEYS, Page, Pulse, State
from outlast.worker.sentinels.own_time import OwnTime

RESULT_BYTES_MAX = 4096
APPLIED_S = 0.25  # time for a won phase to complete before its answer is sent without a result
LEASE_WAIT_S = 60.0
LEASE_LOOK_S = 0.01
_UNDECIDED: tuple[State, ...] = ("voting", "applying")


class PresenceReport(NamedTuple):
    """A worker's report for absent ranks, see messages.Status. `is_first`: it reports its own
    state for them."""

    needs: str = ""
    calls: str = ""
    use: messages.GroupUse = messages.GroupUse()
    tables: Mapping[str, bool] = MappingProxyType({})
    is_first: bool = False


class WorkerStatus:
    """The worker's generation, place and state. `n`: phases completed; `step`: steps committed."""

    def __init__(
        self,
        page: Page,
        send: Callable[[messages.WorkerBody], None],
        sever: Callable[[int], None],
        own_time: OwnTime | None = None,
    ) -> None:
        self.page, self._send, self._sever = page, send, sever
        # of a generation: listeners of peers that did not answer when groups were connected
        self.unreachable: Callable[[int], Collection[str]] = lambda _: ()
        self.presence: Callable[[], PresenceReport] = PresenceReport
        self.own_time = own_time or OwnTime()
        self._lock = threading.RLock()
        self.inbox: queue.Queue[messages.ControllerBody] = queue.Queue(maxsize=1024)
        self.generation = 0  # the newest known to this worker
        self.closed = 0  # all generations up to this one have ended
        self.opened = 0
        self.term = 0  # whose controller opened the newest generation
        self.n = 0
        self.step = 0
        self.state: State = "starting"
        self._step_won = 0  # steps committed once the won phase is complete
        self.requested: Literal["", "save", "drain"] = ""  # the checkpoint that comes first
        self.is_before_setup = False  # connected for the first time, before the set-up collectives
        self.joining = False  # has not adopted the seat's state yet: cannot be a donor
        self.rehearsing = False  # a live rehearsal cut short leaves DDP half-way on some ranks
        self.copy: messages.Checkpointed | None = None  # newest in memory with every rank's part
        self.pending_copy: messages.Checkpointed | None = None  # of the phase under way
        self.is_redoable = False  # `copy` is the state before the last phase, which can be redone
        self.is_pending_redoable = False  # likewise, of the phase under way
        self._leaves = 0  # the generation that this worker leaves before its next phase
        self._is_answer_due = False
        self._answered = 0  # the newest generation with an answer to its Close
        self._collectives = 0
        self._t_state_ns = self._t_attempt_ns = time.monotonic_ns()
        self._key = 0  # of the newest phase, as the hang watch knows it
        self._kind = ""  # of the newest phase
        self._keys: dict[str, int] = {}
        self._paces: dict[
            int, tuple[int, worker_page.PhasePace]
        ] = {}  # by key: its place in the page
        self.exit_code = 0  # with which the script has asked to end
        self.loss = float("nan")
        self.result = b""  # of the newest completed phase
        self.shared = False

    # --- the main thread ---

    @property
    def is_open(self) -> bool:
        """Return whether this worker may vote; after an answer to Close it never votes again."""
        return self.opened == self.generation > max(self.closed, self._answered)

    def enter(self, state: State) -> None:
        """Move to `state`; send the pending answer to a Close once the vote's outcome is known."""
        with self._lock:
            if "sharing" in (self.state, state) and self.state != state:
                own = self.own_time
                own.begin_wait() if state == "sharing" else own.end_wait()
            self.state = state
            self._t_state_ns = time.monotonic_ns()
            self._beat()
            if self._is_answer_due and state not in _UNDECIDED:
                self._answer(self._reported_state(), None)

    def enter_attempt(self, state: State, name: str = "") -> None:
        """Enter `state`. Raises StepRefused if the generation has ended, or this worker leaves it.
        `name`: kind of phase, at the beginning of an attempt."""
        with self._lock:
            if not self.is_open:
                raise StepRefused("the generation closed before the attempt began")
            if name and self._leaves == self.generation and not self.rehearsing:
                self._answer(self._reported_state(), None)
                raise StepRefused("another worker takes this rank before the attempt begins")
            if name:
                self.pending_copy, self.is_pending_redoable = None, False
                self._key = self._keys.get(name) or self._name_key(name)
                self._kind = name
                self._collectives = 0
            self.enter(state)
            if name:
                self._t_attempt_ns = self._t_state_ns
                self.own_time.enter_phase(self._t_state_ns, self.opened)
            elif state == "voting":
                self.own_time.enter_vote(self._t_state_ns)

    def _name_key(self, name: str) -> int:
        """Return a new key, or 0 beyond KEYS kinds, which the hang detector does not time."""
        if len(self._keys) == KEYS:
            return 0
        key = self._keys[name] = worker_page.phase_key(name)
        return key

    def won(self, step: int) -> None:
        """Record a won vote: phase n+1 is being applied; `step`: committed steps after it."""
        with self._lock:
            self._step_won = step
            self.enter("applying")
            is_step, kind, now_ns = step > self.step, self._kind, self._t_state_ns
            self.own_time.won(now_ns, self.page, step=step, is_step=is_step, kind=kind)
            if self._is_answer_due:
                self._answer_after_grace()

    def completed(self, *, step: int, result: bytes, shared: bool) -> None:
        """Record that phase n+1 is complete on this worker."""
        with self._lock:
            self.result = result if len(result) <= RESULT_BYTES_MAX else b""
            self.shared = shared
            self.n += 1
            self.step = step
            self.copy, self.pending_copy = self.pending_copy or self.copy, None
            self.is_redoable, self.is_pending_redoable = self.is_pending_redoable, False
            self.enter("idle")
            if self._key:
                place, before = self._paces.get(self._key, (len(self._paces), worker_page.UNSEEN))
                now = worker_page.updated_pace(before, self._t_state_ns - self._t_attempt_ns)
                self._paces[self._key] = place, now
                self.page.put_pace(place, self._key, now)

    def take_back(self) -> None:
        """Record that the last phase, a step, is taken back on this worker."""
        with self._lock:
            self.n -= 1
            self.step -= 1
            self.result, self.shared = b"", False
            self.is_redoable = self.is_pending_redoable = False
            self.pending_copy = None  # of a refused attempt behind that step
            self._beat()

    def collective(self) -> None:
        """Count a collective."""
        self._collectives += 1
        self._beat()

    def finished(self) -> messages.Finished:
        """Return the report of the script's end."""
        return messages.Finished(n=self.n, step=self.step, exit_code=self.exit_code)

    def report_prepared(self, fault: Fault) -> None:
        """Report this worker as prepared: its vote was cast and ended in an error."""
        with self._lock:
            self._answer("prepared", fault)

    def report_fault(self, fault: Fault) -> None:
        """Report a failure that this worker detects first. The report is also its answer to Close,
        so none is sent during an undecided vote, which fails by itself."""
        with self._lock:
            if self.generation > self._answered and self.state not in _UNDECIDED:
                self._answer(self._reported_state(), fault)

    def report_loss(self, state: str, fault: Fault) -> None:
        """Report this process as "torn" or "broken": it must be replaced whatever it answered
        before."""
        with self._lock:
            self._answer(state, fault)

    def fault(self, kind: FaultKind, detail: str, trace: str, seat: int, t_ns: int) -> Fault:
        """Return a fault of this rank at its present place."""
        return Fault(
            kind=kind,
            detail=detail[:2000],
            traceback=trace[-8000:],
            seat=seat,
            n=self.n,
            step=self.step + 1,
            state=self.state,
            t_ns=t_ns,
        )

    def next_message(self, timeout_s: float) -> messages.ControllerBody:
        """Return the controller's next message. Raises GaveUpError after `timeout_s`."""
        try:
            return self.inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise GaveUpError(
                f"no message of the controller for {timeout_s:.0f} s while this worker was before"
                f" phase {self.n + 1} (step {self.step}); committed work is in the other ranks and"
                " in the newest checkpoint"
            ) from None

    # --- the reader thread ---

    def leave(self, generation: int) -> None:
        """Answer before the next phase of this generation, in place of beginning it. All ranks
        rehearse together: such an attempt is not left out."""
        with self._lock:
            self._leaves = generation

    @property
    def is_refused(self) -> bool:
        """Return whether the present attempt cannot be completed: the script does not go on behind
        it before another generation is open."""
        with self._lock:
            return not self.is_open and self.state in ("running", "sharing")

    def close(self, body: messages.Close) -> None:
        """Close a generation: answer now, or once the outcome of the vote is known."""
        with self._lock:
            self.generation = max(self.generation, body.generation)
            self.closed = max(self.closed, body.generation)
            if body.generation > self._answered:
                if self.state in _UNDECIDED:
                    self._is_answer_due = True
                    if self.state == "applying":
                        self._answer_after_grace()
                else:
                    self._answer(self._reported_state(), None)
        self._sever(body.generation)

    def answer_if_won(self) -> None:
        """Send a pending answer after a won vote before the phase is complete."""
        with self._lock:
            if self._is_answer_due and self.state == "applying":
                self._answer("applying", None)

    def _answer_after_grace(self) -> None:
        timer = threading.Timer(APPLIED_S, self.answer_if_won)  # the script has the main thread
        timer.daemon = True
        timer.start()

    # --- both, under the lock ---

    def _reported_state(self) -> str:
        if (self.state == "setup" or self.is_before_setup) and self.opened:
            return "broken"  # set-up collectives were cut: the script cannot be put back there
        if self.state in ("running", "sharing", "checkpoint", "dry"):
            return "broken" if self.rehearsing else "running"
        if self.joining:
            return "joining"
        return "finished" if self.state == "finished" else "idle"

    def _answer(self, state: str, fault: Fault | None) -> None:
        self._is_answer_due = False
        self._answered = self.generation
        news = fault if self.generation > self.closed or state in ("torn", "broken") else None
        silent = silent_hosts(fault.detail) if fault else set[str]()
        peers = self.unreachable(self.generation)
        applying = state == "applying"  # the phase's result is not known yet
        presence = self.presence()
        self._send(
            messages.Status(
                generation=self.generation,
                n=self.n + applying,
                step=self._step_won if applying else self.step,
                state=state,
                fault=news,
                result=b"" if applying else self.result,
                shared=self.shared and not applying,
                copy=(self.pending_copy if applying else None) or self.copy,
                redoable=self.is_pending_redoable if applying else self.is_redoable,
                unreachable=tuple(sorted(silent.union(map(host_of, peers)))),
                needs=presence.needs,
                calls=presence.calls,
                use=presence.use,
                tables=dict(presence.tables),
                slots=self.page.slots() if presence.is_first else {},
            )
        )

    def await_lease(self) -> None:
        """Wait while others may have this rank: its agent kills this worker, or renews the lease.

        Raises GroupError if neither happens. A host that stood still wakes all its processes at
        once, so that a vote may be won before the agent looks at its lease.
        """
        if self.page.has_lease():
            return
        until_s = time.monotonic() + LEASE_WAIT_S
        while time.monotonic() < until_s:
            time.sleep(LEASE_LOOK_S)  # the agent writes into shared memory, and wakes nobody
            if self.page.has_lease():
                return
        raise GroupError(
            f"this host has had no lease for {LEASE_WAIT_S:g} s; a vote is not applied"
        )

    def _beat(self) -> None:
        self.page.beat(
            self.n,
            self.step,
            self.state,
            self._collectives,
            time.monotonic_ns(),
            self._t_state_ns,
            self.loss,
            self._key,
        )


_PERIOD_S = (0.02, 0.5)
_FLOOR_PART = 10  # per hang floor: several readings before a rank is judged


class PulseThread:
    """Thread that writes the page's pulse several times per hang floor; 50 us per write."""

    def __init__(self, page: Page, is_waiting: Callable[[], bool], floor_s: float) -> None:
        """`is_waiting`: whether an operation with other ranks is under way; from any thread."""
        self.page, self._is_waiting = page, is_waiting
        least_s, most_s = _PERIOD_S
        self._period_s = min(most_s, max(least_s, floor_s / _FLOOR_PART))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlast-pulse", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            self.write()

    def write(self) -> None:
        """Write one reading; `is_waiting` is called only if the main thread has not moved."""
        beat_ns, now_ns = self.page.read().t_ns, time.monotonic_ns()
        still = now_ns - beat_ns > self._period_s * 1e9
        is_waiting = still and self._is_waiting()
        before = self.page.pulse()
        released = before.is_waiting and not is_waiting
        self.page.put_pulse(
            Pulse(now_ns, beat_ns, is_waiting, now_ns if released else before.released_ns)
        )
