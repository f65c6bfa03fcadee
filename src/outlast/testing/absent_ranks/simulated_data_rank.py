"""A simulated worker's part in runs that go on with fewer ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from outlast.controller.recovery.rank_units import Units
from outlast.events import Fault
from outlast.testing.absent_ranks.rank_histories import (
    TrainedShare,
    data_of,
    merge_slots,
    newest_own,
    own_of,
    own_tail,
)
from outlast.testing.sentinels.simulated_pace import SimPace
from outlast.testing.simulated_rebuild import PartnerProcess
from outlast.transport import messages
from outlast.transport.group_messages import GroupUse
from outlast.transport.rank_spans import pack_ranks

if TYPE_CHECKING:
    from outlast.testing.absent_ranks.simulated_data import SimData


class DataProcess(PartnerProcess):
    """A rank with a place in its data, which follows the ranks that leave and come back."""

    def begin_pace(self) -> tuple[float, float]:
        """Return the bounds of the length of an attempt that begins now."""
        cluster = self.cluster
        place = self.seat, self.n + 1, cluster.plan.slow
        bounds = self.pace.begin(self.line.now_s, *place, cluster.slow_workers, self.name)
        if (pace := cluster.plan.pace) is None or cluster.plan.slow is not None:
            return bounds
        attempt_s = pace.attempt_s(self.line.dice, self.seat, self.n + 1)
        return attempt_s, attempt_s

    def begin_parts(self) -> None:
        """Initialize the state of all parts; there is no place in the data yet."""
        self.pace = SimPace()
        self.begin_audits()
        self.begin_rebuilds()
        self.begin_partners()
        self.data: SimData | None = None
        self.units: Units = ()  # of ranks that leave together
        self._before_n = -1  # of the newest slot `before`
        self.deputies: dict[int, int] = {}  # by absent rank
        self.last_own: dict[int, int | None] = {}  # own state of the absent ranks of this deputy

    @property
    def step(self) -> int:
        """Return the committed steps."""
        return self.data.step if self.data is not None else self.n

    def step_at(self, n: int) -> int:
        """Return the committed steps behind phase n, this rank's newest or the one under way."""
        if self.data is None:
            return n
        return self.data.step + (n > self.n and self.data.kind == "step")

    @property
    def absent(self) -> frozenset[int]:
        """Return the ranks that are absent from the connected generation."""
        if self.mesh is None:
            return frozenset()
        return frozenset(range(len(self.mesh.seats))).difference(self.mesh.present)

    @property
    def is_first(self) -> bool:
        """Return whether it is the first of the ranks that are present."""
        return self.mesh is not None and self.seat == min(self.mesh.present)

    def status_at(self, n: int, word: str, fault: Fault | None) -> messages.Status:
        """Return the answer to Close, with what the controller has to know of absent ranks."""
        status = super().status_at(n, word, fault)
        options = self.cluster.plan.shrinking
        if options is None:
            return msgspec.structs.replace(status, needs="an all-gather")
        return msgspec.structs.replace(
            status,
            needs="an all-gather" if options.needs_all else "",
            use=self.group_use(),
            slots=self.slots.read() if self.absent and self._is_of_first_unit() else {},
        )

    def group_use(self) -> GroupUse:
        """Return the groups in which this rank's phases run collectives."""
        options, world = self.cluster.plan.shrinking, self.cluster.plan.world
        if options is None:
            return GroupUse()
        everybody = pack_ranks(range(world))
        roots = ((options.root, everybody),) if options.root >= 0 else ()
        if options.unit == 1:
            return GroupUse(roots=roots)
        unit = self.seat // options.unit
        replica = pack_ranks(range(unit * options.unit, (unit + 1) * options.unit))
        shards = pack_ranks(range(self.seat % options.unit, world, options.unit))
        sampler = (world // options.unit, unit) if options.shares else (world, self.seat)
        return GroupUse((replica,), (shards, everybody), roots, sampler)

    def _is_of_first_unit(self) -> bool:
        """Return whether its slots are those with which others may come back."""
        assert self.mesh is not None
        unit = self.cluster.plan.shrinking.unit if self.cluster.plan.shrinking else 1
        return self.seat // unit == min(self.mesh.present) // unit

    # --- places ---

    def take_first_place(self, checkpoint: messages.Checkpointed | None) -> None:
        """Take the own state and the place in the data of a start."""
        part = None
        if checkpoint is not None:
            part = self.cluster.shelf.part(checkpoint, self.seat)
        if part is not None:
            self.ledger.histories.begin_from_part(self.seat, self.n, part)
        self.own = self.ledger.own(self.seat, self.n)
        self.data = self.cluster.new_data(self.seat)
        if self.data is not None and checkpoint is not None:
            self.data.take(self.cluster.shelf.place(checkpoint))

    def take_place(self, body: messages.Seat) -> None:
        """Take the own state and the place in the data of a rank's last worker; of another rank's
        place, where the rank has been absent."""
        n, slots = body.n, merge_slots(body.slots, body.n, body.seat)
        before, after = slots.get(f"before:{n}"), slots.get(f"after:{n}")
        slot = before if before is not None else after
        assert slot is not None
        self.own = own_of(slot) if before is not None else own_tail(own_of(slot), n)
        self.data = self.cluster.new_data(self.seat)
        if self.data is not None:
            self.inherited = slots
            self.data.take(data_of(slot))
        if slots.keys() != body.slots.keys():
            self.ledger.histories.come_back(self.seat, n, self.own)

    def stand(self) -> None:
        """Write the own state with which a rank begins."""
        if self.data is None:
            super().stand()
        self.state = "idle"

    def write_before(self) -> None:
        """Write the slot before the next phase, once for each place."""
        if self.data is not None and self._before_n != self.n:
            self._before_n = self.n
            self.write(f"before:{self.n}", self.own)

    def write(self, key: str, value: int) -> None:
        """Write a slot."""
        self.ledger.histories.write(self.seat, value)
        super().write(key, value)

    def packed_data(self, _kind: str) -> bytes:
        """Return the place in the data for a slot of this kind."""
        if self.data is None or _kind == "result":
            return b""
        return b" " + self.data.pack(behind=_kind == "after")

    def data_place(self) -> tuple[int, bytes]:
        """Return the committed steps, and the place in the data."""
        return self.step, self.data.pack(behind=False) if self.data is not None else b""

    def take_data_back(self, before: bytes) -> None:
        """Take the place in the data of a slot."""
        if self.data is not None:
            self.data.take(data_of(before))

    # --- phases ---

    def open_data(self, step: int) -> None:
        """Follow a change of the ranks that are present, at a place with `step` committed steps."""
        if step != self.step:
            self.ledger.fail(f"{self.name} has {self.step} steps, and {step} are decided")
        if self.data is None:
            return
        if self.data.follow(self.absent, self.units, step):
            self._before_n = -1
        if not 0 <= (number := self.data.read_again()) < self.ledger.world * (self.data.rows or 1):
            self.ledger.fail(f"{self.name} reads batch {number} of {self.data.rows} rows again")
        self.data.go_on()

    def share(self) -> TrainedShare:
        """Return this rank's share in the next phase."""
        if self.data is None:
            return TrainedShare(self.own, "step", 0, None, b"", 0)
        return TrainedShare(self.own, *self.data.share(), self.data.rows)

    def commit_data(self) -> None:
        """Complete a phase."""
        options = self.cluster.plan.shrinking
        if options and options.unit > 1 and not options.forgets and self.completed == 0:
            self.say(messages.GroupsUsed(use=self.group_use()))
        if self.data is not None:
            self.data.commit()

    def tail(self) -> None:
        """Run the script's code behind a phase."""
        if self.data is None:
            super().tail()
            return
        self.own = own_tail(self.own, self.n)
        self.data.go_on()
        self.point("tail")

    # --- checkpoints while ranks are absent ---

    def connect_partners(self, body: messages.Connect) -> None:
        """Connect partners, and become the deputy of absent ranks."""
        super().connect_partners(body)
        self.deputies = dict(body.deputies)
        ranks = [rank for rank, deputy in self.deputies.items() if deputy == self.seat]
        if not {*ranks} <= body.slots.keys():
            self.ledger.fail(f"{self.name} has the slots of {[*body.slots]}, not those of {ranks}")
        self.last_own = {rank: newest_own(body.slots[rank]) for rank in ranks}

    def save(self) -> None:
        """Save a checkpoint, with the parts of absent ranks."""
        if without := self.absent - self.deputies.keys():
            error = f"ranks {sorted(without)} are absent"
            self.say(messages.SaveFailed(n=self.n, step=self.step, error=error))
            return
        assert self.mesh is not None
        parts: dict[int, int] = {}
        for rank, deputy in self.deputies.items():
            last = self.mesh.members[deputy].last_own[rank]
            unit = next((unit for unit in self.units if rank in unit), (rank,))
            parts[rank] = self.ledger.histories.part_of(rank, self.opened, unit, last, self.own)
        self.cluster.shelf.keep_parts(self.n, f"g{self.opened}", parts)
        self.say(self.stage())
        self.soon(0.001, 0.5, partial(self.write_checkpoint, self.n, self.opened))
