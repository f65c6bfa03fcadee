"""Save engine of a job of one rank."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.rank_threads import alone

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.keeper.keeper_client import KeeperClient
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.save.save_request import SaveRequest, SaveSettings
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

DEADLINE_S = 30.0
steps = itertools.count(1)


class Trainer:
    """Save engine of a job of one rank, with its saves."""

    def __init__(self, root: Path, **how: Any) -> None:
        self.root = root
        self.keeper: KeeperClient = how.pop("keeper", None) or KeeperClient.start("the test")
        exchange = how.pop("exchange", alone)
        settings = SaveSettings(**{"root": root, "job": "job", "rank": 0, "world": 1} | how)
        self.engine = SaveEngine(settings, exchange, self.keeper)

    def order(
        self, tensors: Mapping[str, torch.Tensor], shared: bytes = b"s"
    ) -> tuple[int, SavePoint]:
        place = SavePoint(next(steps), 0, "a")
        origin = {"by": "test"}
        request = SaveRequest(place, tensors, shared=shared, own=b"o", origin=origin)
        return self.engine.save(request), place

    def save(self, tensors: Mapping[str, torch.Tensor], shared: bytes = b"s") -> CheckpointReader:
        """Save, and return a reader of the save once it is committed."""
        number, place = self.order(tensors, shared)
        outcome = self.engine.wait(number, DEADLINE_S)
        assert outcome.kind == "committed", outcome
        return self.read(place)

    def read(self, place: SavePoint) -> CheckpointReader:
        return CheckpointReader(open_checkpoint(Folder(self.root), place))

    def shard(self, reader: CheckpointReader) -> bytes:
        place = reader.checkpoint.place
        return (self.root / place.directory / "shard-00000").read_bytes()

    def signal(self, number: signal.Signals) -> None:
        end = self.keeper._end
        assert end and end.process
        os.kill(end.process.pid, number)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.engine.close(DEADLINE_S)
