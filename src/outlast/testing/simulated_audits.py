"""Audits in the simulated cluster: ranks that report digests, and a judge of verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import multimode

from outlast import events
from outlast.controller.audit.audit_records import CopyBar
from outlast.controller.inputs import CopiesBarred
from outlast.events import Fault
from outlast.testing.run_invariants import RunInvariants
from outlast.testing.simulated_checkpoints import SimCheckpoints
from outlast.testing.simulated_process import SimProcess
from outlast.transport import messages

PATIENCE_S = 15.0
AGAIN_S = 2.0


def bars_of(journal: Iterable[object]) -> tuple[CopyBar, ...]:
    """Return the barred copies that a launcher reads from its journal before a start."""
    entries = [entry for entry in journal if isinstance(entry, CopiesBarred)]
    return tuple(CopyBar(entry.after_n, entry.generation) for entry in entries)


class AuditJudge:
    """Compares the controller's verdicts with the models that ranks really have."""

    def __init__(self, ledger: RunInvariants, shelf: SimCheckpoints) -> None:
        self._ledger, self._shelf = ledger, shelf
        self._reports: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}

    def reported(self, worker: AuditedProcess) -> None:
        """Record the digests that a rank has sent."""
        key = worker.opened, worker.n
        self._reports.setdefault(key, {})[worker.seat] = worker.name, worker.model

    def compared(self, event: events.ReplicasCompared, origins: Mapping[int, int]) -> None:
        """Check the controller's verdict against a count; condemn the ranks in the wrong."""
        ledger = self._ledger
        reports = self._reports.get((event.generation, event.n), {})
        if len(reports) < ledger.world:
            ledger.fail(f"phase {event.n} was judged before all ranks had reported")
        families: dict[int, list[int]] = {}
        for seat, (_, model) in reports.items():
            families.setdefault(origins.get(seat, seat), []).append(model)
        ballots = [_mode(models) for models in families.values()]
        counts = Counter(model for model in ballots if model is not None)
        (most, count), *_ = counts.most_common(1) or [(next(iter(reports.values()))[1], 0)]
        decides = 2 * count > counts.total()
        odd = {seat for seat, (_, model) in reports.items() if model != most}
        if bool(odd) != bool(event.minority) or event.decides != (decides or not odd):
            ledger.fail(f"phase {event.n} was judged {event}, and ranks hold {reports}")
        if odd and decides and set(event.minority) != odd:
            ledger.fail(f"ranks {event.minority} were blamed after phase {event.n}, not {odd}")
        if odd:
            wrong = odd if decides else set(reports)
            ledger.condemned.update(reports[seat][0] for seat in wrong)
            self._shelf.condemn()
        elif most in ledger.wrong:
            self._shelf.absolve(ledger.wrong[most])


def _mode(models: list[int]) -> int | None:
    """Return the most frequent model; None in a tie."""
    modes = multimode(models)
    return modes[0] if len(modes) == 1 else None


class AuditedProcess(SimProcess):
    """A rank that reports its state after a phase, and waits for the answer before it votes."""

    model: int
    generation: int
    closed: int
    opened: int
    answered: int

    def begin_audits(self) -> None:
        """Initialize the state of audits."""
        self._audited = 0  # the generation whose first phase was audited
        self._pending: messages.Audited | None = None
        self._waiting = -1  # the attempt's token while it waits

    def is_open(self) -> bool:
        """Return whether the process is in an open generation."""
        return self.opened == self.generation > max(self.closed, self.answered)

    def audit(self) -> None:
        """Report digests after phase n was applied."""
        self._pending = None
        if self.point("audited") == "flip":
            self.model = self.ledger.flip(self.model)
        if not self.is_open() or (self._audited == self.opened and not self.cluster.plan.flips):
            return
        self._audited = self.opened
        self._pending = messages.Audited(
            generation=self.opened, n=self.n, step=self.n, replica_set=b"", kinds=self._kinds()
        )
        self.cluster.audits.reported(self)
        self.say(self._pending)

    def _kinds(self) -> dict[str, bytes]:
        return {"parameters": str(self.model).encode()}

    def stage(self) -> messages.Checkpointed:
        """Return a memory copy of all ranks' state after this phase, right or wrong."""
        alive = [w for agent in self.cluster.agents.values() for w in agent.workers.values()]
        models = {worker.model for worker in alive if worker.alive} & self.ledger.wrong.keys()
        flips = (self.ledger.wrong[model] for model in models)
        return self.cluster.shelf.stage(self.n, f"g{self.opened}", flips)

    def waits(self) -> bool:
        """Return whether the vote must wait for the answer to the audit of the last phase."""
        pending = self._pending
        if pending is None or pending.generation != self.opened:
            return False
        self._waiting = self.token
        until_s = self.line.now_s + PATIENCE_S
        self.soon(AGAIN_S, AGAIN_S, lambda: self._again(pending, self.token, until_s))
        return True

    def _again(self, pending: messages.Audited, token: int, until_s: float) -> None:
        if self._pending is not pending or self.token != token or not self.is_open():
            return
        if self.line.now_s > until_s:
            self.trouble(Fault(kind="transport", detail="no answer to an audit"))
            return
        self.say(pending)
        self.soon(AGAIN_S, AGAIN_S, lambda: self._again(pending, token, until_s))

    def hear_audit(self, body: messages.AuditRequest | messages.AuditAgreed) -> bool:
        """Handle a question or an answer; return whether a vote waited for it."""
        pending = self._pending
        if isinstance(body, messages.AuditRequest):
            if pending is not None and pending.n == body.n:
                names = {"parameters": {"model": self._kinds()["parameters"]}}
                self.say(messages.AuditNamed(generation=body.generation, n=body.n, names=names))
            return False
        if pending is None or (pending.generation, pending.n) != (body.generation, body.n):
            return False
        self._pending = None
        waited, self._waiting = self._waiting == self.token, -1
        return waited and self.is_open() and self.state == "running" and not self.stalled
