"""A simulated worker's part in rebuilds of lost shards from keepers' memory."""

from __future__ import annotations

from outlast.events import Fault
from outlast.testing.simulated_audits import AuditedProcess
from outlast.testing.simulated_process import WorkerMesh
from outlast.transport import messages


class RebuildingProcess(AuditedProcess):
    """A rank that takes its last phase back, or reads its shards from a copy in memory."""

    own: int
    is_set_up: bool

    def begin_rebuilds(self) -> None:
        """Initialize the state of rebuilds."""
        self.base: messages.Checkpointed | None = None  # of the decision
        self.staged: int | None = None

    def status_at(self, n: int, word: str, fault: Fault | None) -> messages.Status:
        """Return the answer to Close, with the newest copy in memory."""
        copy = self.cluster.shelf.in_memory()
        return messages.Status(
            generation=self.generation,
            n=n,
            step=n,
            state=word,
            fault=fault,
            copy=copy,
            redoable=word != "finished" and copy is not None and copy.n == n - 1,
        )

    def take_back(self) -> None:
        """Take back the last phase: own state from the slot, shards from the copy."""
        n = self.n - 1
        before = self.slots.read().get(f"before:{n}")
        if self.base is None or before is None or self.cluster.shelf.load(self.base) != n:
            self.tear(Fault(kind="unknown", detail=f"phase {self.n} cannot be taken back"))
            return
        self.model, self.own, self.n = self.ledger.model(n), int(before), n
        self.work(0.01, 0.1, lambda: self.point("settled"))

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
