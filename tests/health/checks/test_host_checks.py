"""Memory, disk, clock and service checks on kernel files and tool outputs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.health.judged_samples import about, after, said, severities

from outlast.health.check_contract import AbsentError, ToolError
from outlast.health.check_memory import CheckMemory
from outlast.health.checks import clock_check as clock_probe
from outlast.health.checks import clock_check as clocks
from outlast.health.checks import disk_check
from outlast.health.checks import disk_check as disk_probe
from outlast.health.checks import memory_check as memories
from outlast.health.checks import memory_check as memory_probe
from outlast.health.checks import service_check as services_of
from outlast.health.checks.clock_check import ClockSample
from outlast.health.checks.disk_check import Drive, DrivesSample, SmartSample
from outlast.health.checks.memory_check import MemoryController, MemorySample
from outlast.health.checks.service_check import take as take_services

GIB = 2**30


def put(root: Path, **files: str) -> Path:
    for name, value in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value + "\n")
    return root


# Memory


RAM = MemorySample(
    total_bytes=2000 * GIB, available_bytes=1000 * GIB, hugepages=0, controllers=None
)


def test_memory_is_read(tmp_path: Path) -> None:
    root = put(
        tmp_path, proc__meminfo="MemTotal: 1024 kB\nMemAvailable: 512 kB\nHugePages_Total:   7",
        sys__devices__system__edac__mc__mc0__ce_count="12",
        sys__devices__system__edac__mc__mc0__ue_count="0",
    )  # fmt: skip
    sample = memory_probe.take(root)
    assert (sample.total_bytes, sample.available_bytes, sample.hugepages) == (2**20, 2**19, 7)
    assert sample.controllers == (MemoryController(name="mc0", corrected=12, uncorrected=0),)
    empty = memory_probe.take(tmp_path / "none")
    assert empty.total_bytes is None and empty.controllers is None
    assert severities(memories.CHECK, empty, about()) == ["unknown"]


@pytest.mark.parametrize(
    ("wanted", "severity"),
    [
        ({}, "healthy"), ({"total_gib": 2040}, "healthy"), ({"total_gib": 2041}, "drain"),
        ({"hugepages": 1}, "drain"), ({"available_percent": 51}, "warn"),
        ({"available_percent": 49}, "healthy"),
    ],
)  # fmt: skip
def test_memory_as_expected(wanted: dict[str, float], severity: str) -> None:
    assert severities(memories.CHECK, RAM, about(memory=wanted)) == [severity]


def test_corrected_errors_count_by_the_hour_and_others_at_once() -> None:
    def counted(corrected: int, uncorrected: int = 0) -> MemorySample:
        one = MemoryController(name="mc0", corrected=corrected, uncorrected=uncorrected)
        return msgspec.structs.replace(RAM, controllers=(one,))

    check = memories.CHECK
    assert severities(check, counted(10_000), about(CheckMemory())) == ["healthy"]
    memory = after(check, counted(10_000), about(CheckMemory()))
    assert severities(check, counted(10_100), about(memory, 60)) == ["healthy"]
    assert said(check, counted(10_101), about(memory, 60)) == [
        ("drain", "mc0", "101 corrected errors in the last hour")
    ]
    assert severities(check, counted(0, 1), about()) == ["now"]


def test_counters_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    root = put(
        tmp_path, proc__meminfo="MemTotal: 1024 kB\nMemAvailable: 512 kB",
        sys__devices__system__edac__mc__mc0__ce_count="12",
    )  # fmt: skip
    sample = memory_probe.take(root)
    assert sample.controllers == (MemoryController(name="mc0", corrected=12, uncorrected=None),)
    assert severities(memories.CHECK, sample, about()) == ["unknown"]
    assert [one.key for one in memories.CHECK.counts(sample)] == ["memory|mc0|corrected"]


# Drives


def test_drives_are_whole_ones_with_a_device(tmp_path: Path) -> None:
    root = put(
        tmp_path, sys__block__nvme0n1__size="1000", sys__block__nvme0n1__device__state="live",
        sys__block__nvme0n1__device__model="Fast", sys__block__loop0__size="5",
        sys__block__sdb__size="0", sys__block__sdb__device__state="running",
    )  # fmt: skip
    assert disk_probe.take(counted=False, root=root).drives == (
        Drive(name="nvme0n1", model="Fast", size_bytes=512_000, state="live"),
    )
    with pytest.raises(FileNotFoundError, match="are unknown"):
        disk_probe.take(counted=True, root=tmp_path / "none")
    (tmp_path / "none/sys/block").mkdir(parents=True)
    with pytest.raises(AbsentError):
        disk_probe.take(counted=False, root=tmp_path / "none")
    assert disk_probe.take(counted=True, root=tmp_path / "none").drives == ()


def test_drives_are_judged() -> None:
    assert severities(disk_check.CHECK, DrivesSample(drives=()), about()) == ["unknown"]
    two = DrivesSample(drives=(Drive(name="a", state="live"), Drive(name="b", state="offline")))
    assert said(disk_check.CHECK, two, about()) == [("now", "b", "kernel device state: offline")]
    assert severities(disk_check.CHECK, two, about(disks={"count": 3})) == ["drain", "now"]
    assert severities(disk_check.CHECK, DrivesSample(drives=two.drives[:1]), about()) == ["healthy"]


NVME = """{"smartctl": {"exit_status": %d, "messages": [{"string": "a word"}]},
"smart_status": {"passed": %s}, "temperature": {"current": 40},
"nvme_smart_health_information_log": {"critical_warning": %d, "percentage_used": %d,
 "available_spare": 100, "media_errors": %d}}"""
ATA = """{"smartctl": {"exit_status": 0}, "smart_status": {"passed": true},
"ata_smart_attributes": {"table": [{"id": 5, "raw": {"value": 8}}, {"id": 197, "raw": {}}, 7]}}"""


def smart(answer: str) -> list[tuple[str, str, str]]:
    return said(disk_check.SMART, disk_probe.parse_smart("nvme0n1", answer), about())


@pytest.mark.parametrize(
    ("values", "severity", "word"),
    [
        ((0, "true", 0, 3, 0), "healthy", "passed"),
        ((8, "false", 0, 3, 0), "drain", "failed"),
        ((0, "true", 4, 3, 0), "drain", "0x04"),
        ((0, "true", 0, 96, 0), "warn", "96 %"),
        ((0, "true", 0, 3, 7), "drain", "7 media errors"),
        ((0, "null", 0, 3, 0), "unknown", "a word"),
    ],
)
def test_smart_values_of_a_drive_are_judged(
    values: tuple[object, ...], severity: str, word: str
) -> None:
    ((found, device, detail),) = smart(NVME % values)
    assert (found, device) == (severity, "nvme0n1") and word in detail


def test_other_drives_and_other_answers() -> None:
    assert smart(ATA) == [("warn", "nvme0n1", "8 reallocated sectors")]
    assert smart("{}")[0][0] == "unknown"
    unjudged = ATA.replace('"passed": true', "")
    assert [severity for severity, *_ in smart(unjudged)] == ["warn", "unknown"]
    for answer in ("", "no JSON", "[" * 100_000):
        with pytest.raises(ToolError):
            disk_probe.parse_smart("a", answer)
    with pytest.raises(ToolError, match="a word"):
        disk_probe.parse_smart("a", NVME % (2, "true", 0, 0, 0))
    assert disk_probe.parse_smart("a", '[{"smartctl": 3}]') == SmartSample(name="a")


# Clock


TSC = ClockSample(
    source="tsc", available=("tsc", "hpet"), synchronized=True, off_s=1e-5, told_by="chrony"
)


@pytest.mark.parametrize(
    ("other", "wanted", "severity"),
    [
        ({}, {}, "healthy"),
        ({"source": "hpet"}, {}, "warn"),
        ({"source": "hpet"}, {"source": "hpet"}, "healthy"),
        ({}, {"source": "hpet"}, "drain"),
        ({"source": ""}, {}, "unknown"),
        ({"off_s": -0.2}, {}, "drain"),
        ({"off_s": -0.2}, {"skew_s": 0.3}, "healthy"),
        ({"synchronized": False}, {}, "unknown"),
        ({"synchronized": False}, {"synchronized": True}, "drain"),
        ({"synchronized": False}, {"synchronized": False}, "healthy"),
        ({"synchronized": None}, {}, "unknown"),
    ],
)
def test_clocks(other: dict[str, object], wanted: dict[str, object], severity: str) -> None:
    sample = msgspec.structs.replace(TSC, **other)
    assert severities(clocks.CHECK, sample, about(clock=wanted)) == [severity]


def test_chronys_answer_is_read() -> None:
    line = (
        "C0A80001,192.168.0.1,3,1763000000.123,-0.000012,0.000001,0.00001,1.5,0.1,0.02,0.002,"
        "0.0005,64.2,Normal"
    )
    told = clock_probe.of_chrony(line)
    assert told == (True, -0.000012, pytest.approx(0.0015), "chrony")
    away = clock_probe.of_chrony(line.replace("Normal", "Not synchronised"))
    assert away is not None and away.synchronized is False
    assert clock_probe.of_chrony("506 Cannot talk to daemon") is None


def test_the_clock_of_this_machine() -> None:
    sample = clock_probe.take()
    assert sample.told_by in {"chrony", "the kernel", "adjtimex"}
    assert sample.off_s is None or abs(sample.off_s) < 3600


# Services


def test_services() -> None:
    sample = services_of.ServicesSample(
        states={"munge": "active", "sshd": "failed", "x": "activating"}
    )
    wanted = about(services={"active": ["munge", "sshd", "x", "y"]})
    assert said(services_of.CHECK, sample, wanted) == [
        ("drain", "sshd", "is failed"), ("warn", "x", "is activating"),
        ("unknown", "y", "is not reported"),
    ]  # fmt: skip
    assert severities(services_of.CHECK, sample, about(services={"active": ["munge"]})) == [
        "healthy"
    ]


def test_service_states_come_from_systemctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AbsentError):
        take_services(())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="systemctl is not installed"):
        take_services(("sshd",))
    tool = tmp_path / "systemctl"
    tool.write_text('#!/bin/sh\nshift\nfor name; do echo "active"; done\nexit 3\n')
    tool.chmod(0o755)
    assert take_services(("sshd", "munge")).states == {"sshd": "active", "munge": "active"}
    tool.write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    with pytest.raises(ToolError, match="may not run here"):
        take_services(("sshd",))
