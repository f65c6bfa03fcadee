"""Checkpoints of a simulated run, its audits, and a judge of their verdicts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import multimode

from outlast import events
from outlast.controller.audit.audit_records import CopyBar, is_barred
from outlast.controller.audit.corruption import CHECK
from outlast.controller.inputs import CopiesBarred
from outlast.events import Fault
from outlast.testing.run_invariants import RunInvariants
from outlast.testing.simulated_process import SimProcess
from outlast.transport import messages

PATIENCE_S = 15.0
AGAIN_S = 2.0
WRONG_GRADIENT = -1  # a digest that no model has


class SimCheckpoints:
    """Checkpoints by phase: the newest two in memory, until a host is lost, and those on disk.

    With `rots`, the newest one on disk is damaged when a restart reads it.
    """

    def __init__(self, *, rots: bool) -> None:
        self._rots = rots
        self._copies: list[messages.Checkpointed] = []
        self._on_disk: list[messages.Checkpointed] = []
        self._places: dict[tuple[int, str], tuple[int, bytes]] = {}  # by phase and mark
        self._parts: dict[tuple[int, str], dict[int, int]] = {}  # own state of absent ranks
        self._tainted: dict[str, set[int]] = {}  # saved while ranks had models with these flips
        self._condemned: set[str] = set()  # likewise, and an audit has found it since
        self._known_s = math.inf

    def stage(
        self,
        n: int,
        mark: str = "",
        flips: Iterable[int] = (),
        place: tuple[int, bytes] = (-1, b""),
    ) -> messages.Checkpointed:
        """Record that every rank has copied its part.

        `mark`: term and generation, as in a real name. `flips`: flipped bits that ranks suffer
        from. `place`: committed steps, and the place in the data.
        """
        self._places[n, mark] = place
        copy = self._at(n, "memory", mark)
        self._copies = [*self._copies[-1:], copy]
        self._known_s = math.inf
        if flipped := set(flips):
            self._tainted[copy.path] = self._tainted[self._at(n, "disk", mark).path] = flipped
        return copy

    def save(
        self, n: int, mark: str = "", *, fails: bool = False
    ) -> messages.Checkpointed | messages.SaveFailed:
        """Write a checkpoint to disk, unless it `fails`."""
        if fails:
            step = self._at(n, "disk", mark).step
            return messages.SaveFailed(n=n, step=step, error="no space left")
        self._on_disk.append(self._at(n, "disk", mark))
        return self._on_disk[-1]

    def forget(self, known_s: float) -> None:
        """Drop the copies in memory after the loss of a host, known to all from `known_s` on."""
        self._copies = []
        self._known_s = min(self._known_s, known_s)

    def in_memory(self) -> messages.Checkpointed | None:
        """Return the newest copy in memory, as ranks know it."""
        return self._copies[-1] if self._copies else None

    def condemn(self, flips: Iterable[int]) -> None:
        """Condemn checkpoints that were saved while a rank suffered from flips, which an audit has
        found."""
        found = set(flips)
        self._condemned |= {path for path, each in self._tainted.items() if each & found}

    def absolve(self, flip: int) -> None:
        """Clear checkpoints of a flip that all ranks share: no audit can find it any more."""
        for path in [path for path, flips in self._tainted.items() if flips <= {flip}]:
            del self._tainted[path]

    def is_condemned(self, checkpoint: messages.Checkpointed | None) -> bool:
        """Return whether the run must not start from this checkpoint."""
        return checkpoint is not None and checkpoint.path in self._condemned

    def newest(self, bars: Sequence[CopyBar] = ()) -> messages.Checkpointed | None:
        """Return the newest unbarred checkpoint on disk."""
        return _newest(self._on_disk, bars)

    def verified(
        self, bars: Sequence[CopyBar] = (), *, from_disk: bool = False
    ) -> messages.Checkpointed | None:
        """Return the checkpoint that a restart finds; the last one never rots."""
        disk = _newest(self._on_disk, bars)
        if self._rots and disk is not None and len({saved.n for saved in self._on_disk}) > 1:
            self._on_disk = [saved for saved in self._on_disk if saved.path != disk.path]
            disk = _newest(self._on_disk, bars)
        copy = None if from_disk else _newest(self._copies, bars)
        return copy if copy and (disk is None or copy.n >= disk.n) else disk

    def load(self, checkpoint: messages.Checkpointed | None) -> int | None:
        """Return the phase of a checkpoint (0 for None); None where it does not exist."""
        if checkpoint is None:
            return 0
        checkpoints = self._copies if self.is_in_memory(checkpoint) else self._on_disk
        return checkpoint.n if checkpoint.path in {saved.path for saved in checkpoints} else None

    def is_in_memory(self, checkpoint: messages.Checkpointed | None) -> bool:
        """Return whether it is a copy in keepers' memory."""
        return checkpoint is not None and checkpoint.tier == "memory"

    def is_known_to_lack(self, checkpoint: messages.Checkpointed | None, now_s: float) -> bool:
        """Return whether all know that it does not exist any more."""
        lost = self.load(checkpoint) is None
        return lost and (not self.is_in_memory(checkpoint) or now_s > self._known_s)

    def place(self, checkpoint: messages.Checkpointed) -> bytes:
        """Return the place in the data of a checkpoint; b"" without one."""
        mark = checkpoint.path.split(" ", 2)[2]
        return self._places.get((checkpoint.n, mark), (-1, b""))[1]

    def keep_parts(self, n: int, mark: str, parts: dict[int, int]) -> None:
        """Keep the own state of absent ranks, as their deputies have saved it."""
        self._parts[n, mark] = parts

    def part(self, checkpoint: messages.Checkpointed, rank: int) -> int | None:
        """Return the own state of a rank that was absent at a checkpoint; None of any other."""
        mark = checkpoint.path.split(" ", 2)[2]
        return self._parts.get((checkpoint.n, mark), {}).get(rank)

    def _at(self, n: int, tier: str, mark: str) -> messages.Checkpointed:
        """Return a checkpoint with typical times, as seat 0 reports it."""
        step, _ = self._places.get((n, mark), (-1, b""))
        return messages.Checkpointed(
            n=n,
            step=n if step < 0 else step,
            path=f"{tier} n{n} {mark}",
            tier=tier,
            blocking_s=0.01,
            flush_s=0.2,
            step_s=0.2,
        )


def _newest(
    checkpoints: Sequence[messages.Checkpointed], bars: Sequence[CopyBar]
) -> messages.Checkpointed | None:
    allowed = [copy for copy in checkpoints if not is_barred(bars, copy.n, copy.path)]
    return max(allowed, key=lambda copy: copy.n, default=None)


def bars_of(journal: Iterable[object]) -> tuple[CopyBar, ...]:
    """Return the barred copies that a launcher reads from its journal before a start."""
    entries = [entry for entry in journal if isinstance(entry, CopiesBarred)]
    return tuple(CopyBar(entry.after_n, entry.generation) for entry in entries)


class AuditJudge:
    """Compares the controller's verdicts with the models that ranks really have."""

    def __init__(self, ledger: RunInvariants, shelf: SimCheckpoints) -> None:
        self._ledger, self._shelf = ledger, shelf
        self._reports: dict[tuple[int, int], dict[int, tuple[str, int]]] = {}
        self._again: dict[tuple[int, int], int] = {}
        self._suspects: set[str] = set()  # workers that have reported wrong bits
        self._newest = (0, 0)  # the round of the last report

    def reported(self, worker: AuditedProcess, body: messages.Audited, digest: int) -> None:
        """Record the digests that a rank has sent."""
        key = body.generation, body.n
        if self._again.setdefault(key, 0) < body.again:  # of another round
            self._again[key] = body.again
            self._reports[key] = {}
        self._reports.setdefault(key, {})[worker.seat] = worker.name, digest
        self._newest = key
        if digest == WRONG_GRADIENT or digest in self._ledger.wrong:
            self._suspects.add(worker.name)

    def warned(self, event: events.Warned) -> None:
        """Check that a finding of corruption names a worker that has reported wrong bits."""
        digests = [digest for _, digest in self._reports.get(self._newest, {}).values()]
        are_most_right = _mode(digests) not in {WRONG_GRADIENT, *self._ledger.wrong}
        if event.check == CHECK and event.worker not in self._suspects and are_most_right:
            self._ledger.fail(f"{event.worker} was right, and the finding is {event}")

    def compared(self, event: events.ReplicasCompared, origins: Mapping[int, int]) -> None:
        """Check the controller's verdict against a count; condemn the ranks with wrong state."""
        ledger = self._ledger
        reports = self._reports.get((event.generation, event.n), {})
        if reports.keys() != ledger.present(event.generation):
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
            found = {model for _, model in reports.values()} & ledger.wrong.keys()
            self._shelf.condemn(ledger.wrong[model] for model in found)
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

    has_state: bool

    def shards(self) -> bytes:
        """Return what this rank holds; equal on replicas."""
        return b"shards %d" % (self.seat % self.cluster.plan.shard_sets)

    def protect(self) -> None:
        """Report what this rank holds."""
        self.say(messages.StateProtected(schema="s", summary="a model", shards=self.shards()))

    def must_be_donor_of(self, joiner: AuditedProcess) -> None:
        """Check that this rank holds state, and the shards of the joiner."""
        if not self.has_state:
            self.ledger.fail(f"{self.name} is a donor without state")
        if self.shards() != joiner.shards():
            self.ledger.fail(f"{self.name} sends other shards than rank {joiner.seat} holds")

    def begin_audits(self) -> None:
        """Initialize the state of audits."""
        self._audited = 0  # the generation whose first phase was audited
        self._pending: messages.Audited | None = None
        self._waiting = -1  # the attempt's token while it waits
        self._disputes = 0  # of the phase under way
        self._covered: dict[int, int] = {}  # window -> the last phase before which it was equal
        self._flips_gradient = self._is_bad = False

    def is_open(self) -> bool:
        """Return whether the process is in an open generation."""
        return self.opened == self.generation > max(self.closed, self.answered)

    def audit(self) -> None:
        """Report digests after the first phase of a generation; votes compare the later ones."""
        self._pending, self._disputes = None, 0
        if self.compares():
            self._covered[self._window(self.n - 1)] = self.n - 1
        if self.point("audited") == "flip":
            self.model = self.ledger.flip(self.model)
        if not self.is_open() or self._audited == self.opened:
            return
        self._audited, self._covered = self.opened, {}
        self._send_audit(0, {"parameters": self.model})

    def compares(self) -> bool:
        """Return whether the votes of this generation compare windows of the state."""
        plan = self.cluster.plan
        return bool(plan.flips or plan.pace) and self._audited == self.opened > 0

    def _window(self, n: int) -> int:
        return n % self.cluster.plan.windows

    def shown(self) -> dict[str, int]:
        """Return what this rank's window shows at the vote on phase n+1: {} without one."""
        if not self.compares():
            return {}
        flip = self.ledger.wrong.get(self.model)
        is_seen = flip is not None and self._window(flip) == self._window(self.n)
        model = self.model if is_seen else self.ledger.model(self.n)
        gradient = WRONG_GRADIENT if self._flips_gradient or self._is_bad else 0
        return {"parameters": model, "gradients": gradient}

    def strike_gradient(self) -> None:
        """Compute a wrong gradient, once or as long as this process lives, where one is planned."""
        self._flips_gradient = False
        if self.compares() and self.point("reduced") == "flip":
            self._flips_gradient = True
            self._is_bad = self.line.dice.random() < 0.3

    def disputed(self, token: int) -> None:
        """Report the window, and run the phase again, since replicas differ."""
        if token != self.token or self.state != "voting" or not self.is_open():
            return
        self.state, self.busy = "running", False
        self._disputes += 1
        self._send_audit(self._disputes, self.shown())
        self.work(0.1, 0.25, self.vote)

    @abstractmethod
    def vote(self) -> None:
        """Vote on the phase under way."""

    def _send_audit(self, again: int, shown: dict[str, int]) -> None:
        is_covered = len(self._covered) == self.cluster.plan.windows
        since_n = min(self._covered.values()) if again and is_covered else -1
        self._pending = messages.Audited(
            generation=self.opened,
            n=self.n,
            step=self.step,
            replica_set=b"",
            kinds={kind: str(digest).encode() for kind, digest in shown.items()},
            parts=2 if again else 1,
            again=again,
            since_n=since_n,
            since_step=since_n,
            has_equal_gradients=True,
        )
        states = [digest for digest in shown.values() if digest]
        self.cluster.audits.reported(self, self._pending, states[-1] if states else 0)
        self.say(self._pending)

    def stage(self) -> messages.Checkpointed:
        """Return a memory copy of all ranks' state after this phase, right or wrong."""
        alive = [w for agent in self.cluster.agents.values() for w in agent.workers.values()]
        models = [each.model for each in alive if each.alive and each.opened == self.opened]
        found = {self.ledger.wrong.get(model) for model in models}
        # A flip that all ranks share cannot be found: no comparison shows it.
        flips = [flip for flip in found if flip is not None] if len(found) > 1 else []
        return self.cluster.shelf.stage(self.n, f"g{self.opened}", flips, self.data_place())

    def data_place(self) -> tuple[int, bytes]:
        """Return the committed steps, and the place in the data."""
        return self.step, b""

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
                names = {kind: {"model": digest} for kind, digest in pending.kinds.items()}
                self.say(messages.AuditNamed(generation=body.generation, n=body.n, names=names))
            return False
        if pending is None:
            return False
        if (pending.generation, pending.n, pending.again) != (body.generation, body.n, body.again):
            return False
        self._pending = None
        waited, self._waiting = self._waiting == self.token, -1
        return waited and self.is_open() and self.state == "running" and not self.stalled
