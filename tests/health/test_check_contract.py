"""Shipped checks under the contract of external checks."""

from __future__ import annotations

import pytest
from tests.health.checks.test_compute_check import one
from tests.health.checks.test_gpu_check import H100, ONE_DOWN, gpu, node
from tests.health.checks.test_host_checks import RAM, TSC
from tests.health.checks.test_kernel_log_check import OOM, XID79, log
from tests.health.checks.test_link_check import ib
from tests.health.checks.test_mount_check import HOME, mounted

from outlast.health.check_contract import AnyCheck, Sample
from outlast.health.check_settings import CheckSettings, parse_settings
from outlast.health.checks import (
    clock_check,
    compute_check,
    disk_check,
    gpu_check,
    kernel_log_check,
    link_check,
    memory_check,
    mount_check,
    neighbour_check,
    service_check,
)
from outlast.health.checks.compute_check import ComputeSample
from outlast.health.checks.disk_check import Drive, DrivesSample, SmartSample
from outlast.health.checks.gpu_probe import GpuProcess, GpusSample, LeftoversSample
from outlast.health.checks.link_check import LinksSample
from outlast.health.checks.memory_check import MemoryController, MemorySample
from outlast.health.checks.neighbour_check import PairsSample
from outlast.health.checks.service_check import ServicesSample
from outlast.health.node_examination import SHIPPED
from outlast.testing.extension_contracts import CheckContract

BAD_RAM = MemorySample(
    total_bytes=None, available_bytes=None, hugepages=None,
    controllers=(MemoryController(name="mc0", corrected=3, uncorrected=1),),
)  # fmt: skip
CASES: list[tuple[AnyCheck, list[Sample]]] = [
    (kernel_log_check.CHECK, [log(), log((-2, XID79), (-1, OOM)), log((-2, "quiet"), first=9)]),
    (mount_check.CHECK, [HOME, mounted(type=""), mounted(trouble="ESTALE"), mounted(free_bytes=0)]),
    (memory_check.CHECK, [RAM, BAD_RAM]),
    (link_check.CHECK, [ib(link_downed=3), ib(link_downed=9), ib("DOWN"), LinksSample(ports=())]),
    (disk_check.CHECK, [DrivesSample(drives=(Drive(name="a"), Drive(name="b", state="dead")))]),
    (
        disk_check.SMART,
        [
            SmartSample(name="a", passed=True),
            SmartSample(name="a"),
            SmartSample(name="b", passed=False),
        ],
    ),
    (clock_check.CHECK, [TSC, clock_check.ClockSample(source="", available=())]),
    (
        service_check.CHECK,
        [ServicesSample(states={"a": "active", "b": "failed"}), ServicesSample(states={})],
    ),
    (
        gpu_check.CHECK,
        [
            node(H100, gpu(nvlinks=ONE_DOWN, pci="b", uuid="GPU-2")),
            node(gpu(lost=True)),
            GpusSample(on_bus=8, trouble="no driver"),
        ],
    ),
    (compute_check.CHECK, [one(), one(wrong=1), ComputeSample(devices=())]),
    (
        neighbour_check.CHECK,
        [
            PairsSample(
                rank=0, names=("a", "b", "c"), pairs=((0, 1, 4e9), (1, 2, 4e9), (0, 2, 1e9))
            ),
            PairsSample(rank=1, names=("a", "b"), pairs=()),
            PairsSample(rank=0, names=(), pairs=()),
        ],
    ),
    (
        gpu_check.LEFTOVER,
        [LeftoversSample(on={}), LeftoversSample(on={"a": (GpuProcess(pid=1, name="x"),)})],
    ),
]


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
    def settings(self) -> CheckSettings:
        return parse_settings({"services": {"active": ["a", "b"]}, "gpus": {"count": 2}}, "t")


def test_all_shipped_checks_obey_the_contract() -> None:
    assert {check.name for check, _ in CASES} == {check.name for check in SHIPPED}
