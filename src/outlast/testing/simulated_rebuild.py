"""A simulated worker's part in what comes from the memory of other hosts.

Lost shards are rebuilt from keepers' memory; partners hold each other's own state.
"""

from __future__ import annotations

from typing import cast

from outlast.events import Fault
from outlast.testing.absent_ranks.rank_histories import own_of, own_tail
from outlast.testing.simulated_audits import AuditedProcess
from outlast.testing.simulated_process import NO_ANSWER, WorkerMesh
from outlast.transport import messages
from outlast.transport.partner_memory import PartnerRecord, Stage

_STAGES: dict[str, Stage] = {"before": "before", "after": "voted", "result": "ended"}
_PHASES = 3


class RebuildingProcess(AuditedProcess):
    """A rank that takes its last phase back, or reads its shards from a copy in memory."""

    own: int
    is_set_up: bool
    mesh: WorkerMesh | None

    def begin_rebuilds(self) -> None:
        """Initialize the state of rebuilds."""
        self.base: messages.Checkpointed | None = None  # of the decision
        self.staged: int | None = None

    def status_at(self, n: int, word: str, fault: Fault | None) -> messages.Status:
        """Return the answer to Close, with the newest copy in memory."""
        copy = self.cluster.shelf.in_memory()
        is_cut = fault is not None and fault.detail == NO_ANSWER
        return messages.Status(
            generation=self.generation,
            n=n,
            step=self.step_at(n),
            state=word,
            fault=fault,
            copy=copy,
            redoable=word != "finished" and copy is not None and copy.n == n - 1,
            unreachable=self.mesh.unreached(self.agent.name) if is_cut and self.mesh else (),
        )

    def take_back(self) -> None:
        """Take back the last phase: own state from the slot, shards from the copy."""
        n = self.n - 1
        before = self.slots.read().get(f"before:{n}")
        if self.base is None or before is None or self.cluster.shelf.load(self.base) != n:
            self.tear(Fault(kind="unknown", detail=f"phase {self.n} cannot be taken back"))
            return
        self.model, self.own, self.n = self.ledger.model(n), own_of(before), n
        self.take_data_back(before)
        self.work(0.01, 0.1, lambda: self.point("settled"))

    def step_at(self, n: int) -> int:
        """Return the committed steps behind phase n, this rank's newest or the one under way."""
        return n

    def take_data_back(self, before: bytes) -> None:
        """Take the place in the data of a slot."""

    def rebuild(self, mesh: WorkerMesh) -> None:
        """Read the shards from the copy in keepers' memory, which verifies digests."""
        is_damaged = self.point("receive") == "corrupt"
        if is_damaged or mesh.copy is None or self.cluster.shelf.load(mesh.copy) != self.n:
            self.tear(Fault(kind="unknown", detail=f"the copy {mesh.copy} cannot be read"))
        self.staged = self.ledger.model(self.n)

    def word(self) -> str:
        """Return the state for the answer to Close."""
        if self.state in ("torn", "finished", "prepared", "running", "applying"):
            return self.state
        return "joining" if not self.has_state else "idle" if self.is_set_up else "broken"

    def write_checkpoint(self, n: int, generation: int) -> None:
        """Write the copy to disk; the save may fail."""
        dies = self.line.dice.random() < self.cluster.plan.fails
        if not self.cluster.may_commit(self.agent):
            return  # refused: a newer term exists
        self.say(self.cluster.shelf.save(n, f"g{generation}", fails=dies))


class PartnerProcess(RebuildingProcess):
    """A rank that sends its slots to its partners, and holds theirs."""

    generation: int
    opened: int
    closed: int

    def begin_partners(self) -> None:
        """Initialize the memory for partners, which outlives this process."""
        self.held: dict[tuple[int, int, Stage, int], PartnerRecord] = {}  # as in PartnerMemory
        self.inherited: dict[str, bytes] = {}  # slots of the rank's last worker
        self._bank, self._open_bank = 0, 1
        self._partners: tuple[int, ...] = ()
        self._carried: set[int] = set()
        self._number = 0

    def connect_partners(self, body: messages.Connect) -> None:
        """Begin to hold the partners of a generation that connects."""
        sets = (seats for seats in body.partners if self.seat in seats)
        self._partners = tuple(seat for seat in next(sets, ()) if seat != self.seat)
        self._carried = set()
        self._bank = 1 - self._open_bank
        self.held = {key: record for key, record in self.held.items() if key[0] != self._bank}

    def carry(self) -> None:
        """Send what is kept for this place to the partners, before the generation opens."""
        keys = {f"{kind}:{self.n}" for kind in _STAGES}
        known = {**self.inherited, **self.slots.read()}
        slots = {key: slot for key, slot in known.items() if key in keys}
        self._send("carried", self.n, slots)
        self._carried.add(self.seat)

    def has_carried(self) -> bool:
        """Return whether this rank and all of its partners have sent their state."""
        return self._carried >= {self.seat, *self._partners}

    def partners_opened(self) -> None:
        """Keep this generation's records while the next one connects."""
        if self._partners:
            self._open_bank = self._bank

    def write(self, key: str, value: int) -> None:
        """Write a slot, and send it to the partners of an open generation."""
        kind, n = key.split(":")
        data = str(value).encode() + self.packed_data(kind)
        self.slots.put(key, data, lambda: self.point("slot"))
        if self.opened == self.generation > self.closed:
            self._send(_STAGES[kind], int(n), {key: data})

    def packed_data(self, _kind: str) -> bytes:
        """Return the place in the data for a slot of this kind."""
        return b""

    def _send(self, stage: Stage, n: int, slots: dict[str, bytes]) -> None:
        mesh = self.mesh
        for seat in self._partners if mesh is not None else ():
            member = mesh.members.get(seat) if mesh is not None else None
            if member is not None and member.alive and member.mesh is mesh:
                cast("PartnerProcess", member).hold(self, stage, n, slots)

    def hold(self, sender: PartnerProcess, stage: Stage, n: int, slots: dict[str, bytes]) -> None:
        """Receive slots of a partner."""
        self._number += 1
        record = PartnerRecord(sender.seat, sender.generation, self._number, slots)
        self.held[self._bank, sender.seat, stage, n % _PHASES] = record
        if stage == "carried":
            self._carried.add(sender.seat)
            self.call(self.receive)

    def receive(self) -> None:
        """Go on connecting, if nothing else is missing."""

    def stand(self) -> None:
        """Write the own state with which a rank begins."""
        self.state = "idle"
        self.write(f"before:{self.n}", self.own)

    def tail(self) -> None:
        """Run the script's code behind a phase."""
        self.own = own_tail(self.own, self.n)
        self.write(f"before:{self.n}", self.own)
        self.point("tail")
