"""Saves of a job whose ranks are threads; a failed rank costs one save."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.rank_threads import Exchange, all_ranks
from torch import nn

from outlast import random_state
from outlast.checkpoint.format import codec
from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.load.tensor_fill import fill_tensors
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import Limits, WorkerSettings
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker.groups.rank_presence import RankPresence
from outlast.worker.phases.absent_parts import AbsentParts
from outlast.worker.phases.script_progress import Intervals, ProgressSlot, RankPart
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_checkpointing import RunCheckpointer
from outlast.worker.worker_events import WorkerEvents
from outlast.worker.worker_ports import WorkerPorts
from outlast.worker.worker_status import WorkerStatus

pytestmark = pytest.mark.process
DEADLINE_S = 30.0
TOKEN = "00"


class Talking:
    """Groups, as far as saves use them."""

    def __init__(self, exchange: Exchange, seat: int, world: int) -> None:
        self.gather_bytes, self.seat, self.world = exchange, seat, world
        self.presence = RankPresence()


@pytest.fixture
def keepers() -> Iterator[str]:
    base = f"@outlast-test-saves-{os.getpid()}-"
    setup = KeeperSetup(token=TOKEN)
    served = [ServedKeeper(f"{base}{rank}", f"rank {rank}", setup) for rank in range(3)]
    yield base
    for each in served:
        each.close(DEADLINE_S)


def saver(
    rank: int, exchange: Exchange, run_dir: Path, keepers: str,
    send: Callable[[messages.WorkerBody], None], world: int = 2,
) -> tuple[RunCheckpointer, WorkerStatus]:  # fmt: skip
    settings = WorkerSettings(
        run="job", token=TOKEN, term=1, agent="a", incarnation=1, worker=f"w{rank}", seat=rank,
        world=world, ranks_per_node=world, control_fd=-1, page_fd=-1, run_dir=str(run_dir),
        checkpoint_every=1,
        snapshot_every=0, audit_every=0, until_step=0, keepers=keepers, faults=(), fault_seed=0,
        clock_anchor_ns=0, limits=Limits(),
    )  # fmt: skip
    status = WorkerStatus(Page.create(1 << 16), send, lambda _: None)
    status.generation = 1
    ports = WorkerPorts()
    ports.timeline, ports.status = WorkerEvents(None, f"w{rank}"), status
    ports.link = SimpleNamespace(send=send)
    ports.faults = SimpleNamespace(reach=lambda _: None)
    ports.copies = SimpleNamespace(record=lambda *_: None)
    groups = Talking(exchange, rank, world)
    absent = AbsentParts(groups)
    saves = RunCheckpointer(settings, groups, status, ports, {}, absent=absent, joins=True)
    return saves, status


def model_of(rank: int, step: int, file: Path) -> nn.Module:
    """At the first step rank 1 alone holds more than any host has room for: a file of holes."""
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    if rank == 1 and step == 1:
        model.big = nn.Parameter(torch.from_file(str(file), shared=True, size=1 << 40))
    return model


def test_a_rank_without_room_costs_one_save_and_no_training(tmp_path: Path, keepers: str) -> None:
    said: list[messages.WorkerBody] = []

    def one(rank: int, exchange: Exchange) -> None:
        saves, status = saver(rank, exchange, tmp_path, keepers, said.append)
        for step in (1, 2, 3):
            status.n = status.step = step
            protected = ProtectedState({"model": model_of(rank, step, tmp_path / "big")}, {})
            slot = ProgressSlot(
                n=step, step=step, saved_step=0, prelude=(), batch=b"", done=(), own=b""
            )
            saves.save(protected, slot, to_disk=True, propose=Intervals(1, 1))
            saves.complete()
        saves.settle(DEADLINE_S)

    assert all_ranks(2, one) == [None, None]
    (failed,) = [each for each in said if isinstance(each, messages.SaveFailed)]
    assert failed.step == 1 and "rank 1: not enough memory for 2 arenas" in failed.error
    assert [place.step for place in checkpoint_places(Folder(tmp_path / "checkpoints"))] == [3, 2]


def test_memory_for_saves_is_made_beside_the_first_steps(tmp_path: Path, keepers: str) -> None:
    def one(rank: int, exchange: Exchange) -> None:
        saves, status = saver(rank, exchange, tmp_path, keepers, lambda _: None)
        model = nn.Linear(700, 700)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        protected = ProtectedState({"model": model}, {})
        saves.reserve(protected)
        assert saves._driver
        slots = saves._driver.engine._slots
        slots.join()
        ahead = {slot.arena for slot in slots.ahead}
        status.n = status.step = 1
        slot = ProgressSlot(n=1, step=1, saved_step=0, prelude=(), batch=b"", done=(), own=b"")
        saves.save(protected, slot, to_disk=False, propose=Intervals(1, 1))
        assert {slot.arena for slot in slots} == ahead and len(ahead) == 2
        saves.settle(DEADLINE_S)

    assert all_ranks(2, one) == [None, None]


def slot_of(rank: int, step: int) -> ProgressSlot:
    """Return the slot of a rank whose generators have its number as their seed."""
    with random_state.preserved():
        random.seed(rank)
        choices = codec.encode({"random": random_state.snapshot(), "script": f"of rank {rank}"})
    own = codec.encode({"choices": choices, "buffers": {}})
    return ProgressSlot(n=step, step=step, saved_step=0, prelude=(), batch=b"", done=(), own=own)


def connected(saves: RunCheckpointer, *absent: int, left: dict[str, bytes]) -> None:
    """Connect a generation without these ranks, whose deputy is the rank behind the last one."""
    saves._groups.presence.set(absent, 3, ())
    deputies = tuple((rank, max(absent) + 1) for rank in absent)
    saves._absent.learn(
        messages.Connect(
            generation=2, n=0, transfers=(), timeout_s=1.0, absent=absent, deputies=deputies,
            slots=dict.fromkeys(absent, left),
        )
    )  # fmt: skip


def test_a_deputy_saves_the_part_of_an_absent_rank(tmp_path: Path, keepers: str) -> None:
    said: list[tuple[int, messages.WorkerBody]] = []
    savers: dict[int, tuple[RunCheckpointer, WorkerStatus]] = {}
    left_slot = slot_of(0, 1)

    def save(rank: int, exchange: Exchange, step: int, generation: int) -> None:
        saves, status = savers[rank]
        saves._groups.gather_bytes = exchange
        status.n = status.step = step
        status.generation = generation
        model = nn.Linear(200, 200)
        nn.init.constant_(model.weight, step)
        nn.init.constant_(model.bias, step)
        to_disk = step != 3
        protected = ProtectedState({"model": model}, {})
        saves.save(protected, slot_of(rank, step), to_disk=to_disk, propose=Intervals(1, 1))
        saves.complete()
        saves.settle(DEADLINE_S)

    def begin(rank: int) -> None:
        savers[rank] = saver(
            rank, lambda _: [], tmp_path, keepers, lambda body: said.append((rank, body)), 3
        )

    def without_rank_0(index: int, exchange: Exchange) -> None:
        begin(index + 1)
        left = {"before:1": left_slot.pack()} if index == 0 else {}
        connected(savers[index + 1][0], 0, left=left)
        for step in (2, 3, 4):
            save(index + 1, exchange, step, generation=2)

    def with_all(rank: int, exchange: Exchange) -> None:
        if rank == 0:
            begin(rank)
        connected(savers[rank][0], left={})
        save(rank, exchange, 5, generation=3)

    assert all_ranks(2, without_rank_0) == [None, None]
    assert all_ranks(3, with_all) == [None, None, None]
    reports = [(r, b.step, b.tier) for r, b in said if isinstance(b, messages.Checkpointed)]
    assert sorted(reports) == [
        *((0, 5, tier) for tier in ("disk", "memory")),
        *((1, 2, tier) for tier in ("disk", "memory")),
        (1, 3, "memory"),
        *((1, 4, tier) for tier in ("disk", "memory")),
    ]
    places = checkpoint_places(Folder(tmp_path / "checkpoints"))
    assert [(place.step, place.line) for place in places] == [(5, 0), (4, 0), (2, 0)]
    newest, older, _ = (open_checkpoint(Folder(tmp_path / "checkpoints"), at) for at in places)
    assert newest.commit.parent == older.commit.place.directory and older.commit.world == 3
    reader = CheckpointReader(older)
    weight = torch.zeros(200, 200)
    fill_tensors(reader, {"model.weight": weight})
    assert torch.equal(weight, torch.full((200, 200), 4.0))
    part = ProgressSlot.unpack(RankPart.unpack(reader.blob(0, "own"), "rank 0").slot)
    choices = codec.decode(codec.decode(part.own)["choices"])
    own = codec.decode(codec.decode(left_slot.own)["choices"])
    assert random_state.same(choices["random"], own["random"]), "its own generators"
    assert (part.step, choices["script"]) == (4, "of rank 1"), "at the place of another rank"
    assert reader.blob(0, "shared")
    assert not savers[1][0]._driver._absent, "memory for the part of an absent rank"
