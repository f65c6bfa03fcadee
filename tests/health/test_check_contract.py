"""The shipped checks, held to the contract that checks of one's own are held to."""

from __future__ import annotations

import pytest
from test_gpus_check import H100, ONE_DOWN, gpu, node
from test_kernel_log_check import OOM, XID79, log
from test_links_check import ib
from test_matmul_check import one
from test_mounts_check import HOME, mounted
from test_node_parts import RAM, TSC

from outlast.health.checks import (
    clock,
    compute,
    disks,
    gpus,
    kernel,
    links,
    memory,
    mounts,
    neighbours,
    services,
)
from outlast.health.checks.compute import Products
from outlast.health.checks.disks import Drive, Drives, Smart
from outlast.health.checks.gpus import Gpus, Leftovers, Process
from outlast.health.checks.links import Links
from outlast.health.checks.memory import Controller, Ram
from outlast.health.checks.neighbours import Pairs
from outlast.health.checks.services import Services
from outlast.health.contract import AnyCheck, Sample
from outlast.health.profiles import SHIPPED
from outlast.health.settings import Settings, settled
from outlast.testing.checks import CheckContract

BAD_RAM = Ram(
    total_bytes=None, available_bytes=None, hugepages=None,
    controllers=(Controller(name="mc0", corrected=3, uncorrected=1),),
)  # fmt: skip
CASES: list[tuple[AnyCheck, list[Sample]]] = [
    (kernel.CHECK, [log(), log((-2, XID79), (-1, OOM)), log((-2, "quiet"), first=9)]),
    (mounts.CHECK, [HOME, mounted(type=""), mounted(trouble="ESTALE"), mounted(free_bytes=0)]),
    (memory.CHECK, [RAM, BAD_RAM]),
    (links.CHECK, [ib(link_downed=3), ib(link_downed=9), ib("DOWN"), Links(ports=())]),
    (disks.CHECK, [Drives(drives=(Drive(name="a"), Drive(name="b", state="dead")))]),
    (disks.SMART, [Smart(name="a", passed=True), Smart(name="a"), Smart(name="b", passed=False)]),
    (clock.CHECK, [TSC, clock.Clock(source="", available=())]),
    (services.CHECK, [Services(states={"a": "active", "b": "failed"}), Services(states={})]),
    (gpus.CHECK, [
        node(H100, gpu(nvlinks=ONE_DOWN, pci="b", uuid="GPU-2")), node(gpu(lost=True)),
        Gpus(on_bus=8, trouble="no driver"),
    ]),
    (compute.CHECK, [one(), one(wrong=1), Products(devices=())]),
    (neighbours.CHECK, [
        Pairs(rank=0, names=("a", "b", "c"), pairs=((0, 1, 4e9), (1, 2, 4e9), (0, 2, 1e9))),
        Pairs(rank=1, names=("a", "b"), pairs=()), Pairs(rank=0, names=(), pairs=()),
    ]),
    (gpus.LEFTOVER, [Leftovers(on={}), Leftovers(on={"a": (Process(pid=1, name="x"),)})]),
]  # fmt: skip


class TestShipped(CheckContract):
    @pytest.fixture(params=CASES, ids=lambda case: case[0].name)
    def case(self, request: pytest.FixtureRequest) -> tuple[AnyCheck, list[Sample]]:
        return request.param

    @pytest.fixture
    def check(self, case: tuple[AnyCheck, list[Sample]]) -> AnyCheck:
        return case[0]

    @pytest.fixture
    def samples(self, case: tuple[AnyCheck, list[Sample]]) -> list[Sample]:
        return case[1]

    @pytest.fixture
    def settings(self) -> Settings:
        return settled({"services": {"active": ["a", "b"]}, "gpus": {"count": 2}}, "t")


def test_all_that_is_shipped_is_held_to_it() -> None:
    assert {check.name for check, _ in CASES} == {check.name for check in SHIPPED}
