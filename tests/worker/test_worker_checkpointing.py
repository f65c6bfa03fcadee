"""Saves of a job whose ranks are threads; a failed rank costs one save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.rank_threads import Exchange, all_ranks
from torch import nn

from outlast.checkpoint.keeper.keeper_frames import KeeperSetup
from outlast.checkpoint.keeper.keeper_launch import ServedKeeper
from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder
from outlast.config import Limits, WorkerSettings
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker.phases.script_progress import Intervals, ProgressSlot
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

    def __init__(self, exchange: Exchange) -> None:
        self.gather_bytes = exchange


@pytest.fixture
def keepers() -> Iterator[str]:
    base = f"@outlast-test-saves-{os.getpid()}-"
    setup = KeeperSetup(token=TOKEN)
    served = [ServedKeeper(f"{base}{rank}", f"rank {rank}", setup) for rank in range(2)]
    yield base
    for each in served:
        each.close(DEADLINE_S)


def saver(
    rank: int, exchange: Exchange, run_dir: Path, keepers: str,
    send: Callable[[messages.WorkerBody], None],
) -> tuple[RunCheckpointer, WorkerStatus]:  # fmt: skip
    settings = WorkerSettings(
        run="job", token=TOKEN, term=1, agent="a", incarnation=1, worker=f"w{rank}", seat=rank,
        world=2, ranks_per_node=2, control_fd=-1, page_fd=-1, run_dir=str(run_dir),
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
    saves = RunCheckpointer(settings, rank, Talking(exchange), status, ports, {}, joins=True)
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
