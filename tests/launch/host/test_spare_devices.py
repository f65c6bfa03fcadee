"""Devices of spares, on hosts with and without a GPU for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outlast.launch.host.worker_pool import WorkerPool, WorkerPost
from outlast.launch.run_display import DisplayRecord

if TYPE_CHECKING:
    from tests.launch.conftest import Stage

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("devices", "chosen"), [(0, 1), (2, 1), (4, 2)])
def test_a_spare_without_a_device_of_its_own_gets_that_of_the_seat(
    devices: int, chosen: int, stage: Stage
) -> None:
    """World 2 and 2 spares on a host without GPUs, with one for each seat, with one for all."""

    async def act(crew: WorkerPool, _record: DisplayRecord) -> None:
        workers = [
            crew.start(WorkerPost(name, seat, "here", 1, 0))
            for seat, name in ((0, "w1-0"), (1, "w1-1"), (-1, "w1-2"), (-1, "w1-3"))
        ]
        crew.devices = devices
        await crew.reap(workers[1])
        assert crew.device_for(workers[2], 0) == workers[2].local_rank == chosen
        after = crew.start(WorkerPost("w1-4", -1, "here", 1, 0))
        assert after.local_rank not in {one.local_rank for one in (*workers[:1], *workers[2:])}

    flags = ("--nproc-per-node", "2", "--spares", "2")
    stage.play(stage.plan(stage.script("signal.pause()"), *flags), act)
