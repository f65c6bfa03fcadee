"""GPU check on samples, and the NVML probe where a machine has the library."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.health.judged_samples import about, after, found, said, severities

from outlast.health.check_contract import AbsentError
from outlast.health.check_memory import CheckMemory
from outlast.health.checks.gpu_check import CHECK, LEFTOVER
from outlast.health.checks.gpu_probe import (
    Gpu,
    GpuProcess,
    GpusSample,
    LeftoversSample,
    NvLink,
    on_bus,
    take,
)

H100 = Gpu(
    index=0, pci="0000:3b:00.0", uuid="GPU-1", name="NVIDIA H100 80GB HBM3", temperature_c=41,
    memory_c=52, ecc=True, uncorrected=0, uncorrected_ever=0, remapped=0, remap_pending=False,
    remap_failed=False, held_back=1, power_w=70.0, power_limit_w=700.0, width=16, width_max=16,
    speed=5, speed_max=5, nvlinks=tuple(NvLink(number=k, active=True, errors=0) for k in range(18)),
    fabric_state=3, fabric_status=0,
)  # fmt: skip


def gpu(**other: object) -> Gpu:
    return msgspec.structs.replace(H100, **other)


def node(*gpus: Gpu, on_bus: int | None = None) -> GpusSample:
    return GpusSample(on_bus=len(gpus) if on_bus is None else on_bus, driver="550.54.15", gpus=gpus)


def test_a_sound_gpu_is_healthy() -> None:
    assert said(CHECK, node(H100), about(gpus={"count": 1})) == [
        ("healthy", "0000:3b:00.0", "NVIDIA H100 80GB HBM3, 41 C, 70 of 700 W, 18 NVLinks")
    ]


ONE_DOWN = (NvLink(number=0, active=False, errors=0), *H100.nvlinks[1:])


@pytest.mark.parametrize(
    ("other", "severity", "symptom", "word"),
    [
        ({"lost": True}, "now", "gpu-unavailable", "fell off the bus"),
        ({"ecc": False}, "warn", "gpu-memory", "error correction is off"),
        ({"uncorrected": 2}, "drain", "gpu-memory", "2 uncorrected"),
        ({"remap_failed": True}, "drain", "gpu-memory", "replace it"),
        ({"remap_pending": True}, "drain", "gpu-memory", "reset it"),
        ({"retirement_pending": True}, "drain", "gpu-memory", "page retirement is pending"),
        ({"retired_pages": 61}, "drain", "gpu-memory", "61 retired pages"),
        ({"remapped": 512}, "drain", "gpu-memory", "512 remapped rows"),
        ({"temperature_c": 90}, "warn", "thermal", "90 C"),
        ({"memory_c": 101}, "warn", "thermal", "its memory: 101 C"),
        ({"held_back": 0x20}, "warn", "thermal", "too hot"),
        ({"held_back": 0x48}, "drain", "thermal", "clocks throttled by the hardware: too hot"),
        ({"held_back": 0x88}, "drain", "thermal", "too little power"),
        ({"held_back": 0x08}, "drain", "thermal", "clocks throttled by the hardware"),
        ({"width": 8}, "drain", "pcie", "PCIe x8, x16 is expected"),
        ({"speed": 3, "held_back": 0}, "drain", "pcie", "generation 3, 5 is expected"),
        ({"fabric_state": 2}, "now", "nvlink", "fabric manager"),
        ({"fabric_status": 999}, "now", "nvlink", "failed (999)"),
        ({"unread": {"temperature": "Unknown Error"}}, "unknown", "gpu-driver", "temperature: Unk"),
        ({"name": "NVIDIA A100"}, "drain", "other", "is a NVIDIA A100"),
    ],
)  # fmt: skip
def test_each_fault_is_one_finding(
    other: dict[str, object], severity: str, symptom: str, word: str
) -> None:
    wanted = about(gpus={"name": H100.name})
    (one,) = found(CHECK, node(gpu(**other)), wanted)
    assert (one.severity, one.symptom) == (severity, symptom) and word in one.detail


@pytest.mark.parametrize(
    "other", [{"speed": 1}, {"held_back": 0x04}, {"held_back": None, "ecc": None, "memory_c": None}]
)
def test_power_saving_and_absent_features_are_no_faults(other: dict[str, object]) -> None:
    assert severities(CHECK, node(gpu(**other)), about()) == ["healthy"]


def test_a_gpu_that_is_missing() -> None:
    """The bus shows it or not; the driver has it or not."""
    wanted = about(gpus={"count": 2})
    assert said(CHECK, node(H100), wanted)[0][::2] == (
        "now", "1 on the PCI bus, 2 are expected",
    )  # fmt: skip
    assert said(CHECK, node(H100, on_bus=2), about())[0][::2] == (
        "now", "the driver reports 1, 2 are expected",
    )  # fmt: skip


def test_a_gpu_that_fell_off_the_bus_since_the_last_check_is_missed() -> None:
    """Where the settings count none, a node is held against itself, also as it was."""
    memory = after(CHECK, node(gpu(), gpu(index=1)), about(CheckMemory()))
    one = node(gpu(), on_bus=1)
    assert ("now", "", "1 on the PCI bus, and 2 at an earlier check") in said(
        CHECK, one, about(memory, 60)
    )
    assert "now" not in severities(CHECK, one, about(memory, 60, gpus={"count": 1}))


def test_processes_of_no_gpu_are_unknown() -> None:
    assert severities(LEFTOVER, LeftoversSample(on={}), about()) == ["unknown"]


def test_without_a_driver_nothing_is_healthy() -> None:
    silent = GpusSample(
        on_bus=8, trouble="the NVIDIA driver could not be queried: Driver Not Loaded"
    )
    assert severities(CHECK, silent, about(gpus={"count": 8})) == ["unknown"]
    assert severities(CHECK, silent, about(gpus={"count": 9})) == ["now", "unknown"]


def test_nvlinks_are_as_on_most_gpus_or_as_the_settings_say() -> None:
    lame = gpu(nvlinks=ONE_DOWN, pci="0000:5d:00.0")
    sample = node(H100, H100, lame)
    assert said(CHECK, sample, about())[2] == (
        "now", "0000:5d:00.0", "17 of 18 NVLinks are up (down: 0)",
    )  # fmt: skip
    assert severities(CHECK, node(lame), about(gpus={"nvlinks": 18})) == ["now"]
    assert severities(CHECK, node(lame), about()) == ["healthy"], "nothing to hold it against"
    assert severities(CHECK, node(gpu(nvlinks=())), about()) == ["healthy"]


def test_errors_that_are_new_count() -> None:
    old = gpu(uncorrected_ever=4)
    assert severities(CHECK, node(old), about(CheckMemory())) == ["healthy"]
    memory = after(CHECK, node(old), about(CheckMemory()))
    assert severities(CHECK, node(old), about(memory, 60)) == ["healthy"]
    assert severities(CHECK, node(gpu(uncorrected_ever=5)), about(memory, 60)) == ["drain"]
    worn = gpu(nvlinks=(NvLink(number=0, active=True, errors=101), *H100.nvlinks[1:]))
    assert severities(CHECK, node(worn), about(memory, 60)) == ["warn"]


def test_processes_left_over() -> None:
    mine = GpuProcess(pid=77, name="python", bytes=10**9)
    allowed = GpuProcess(pid=8, name="nv-hostengine")
    at = about()
    assert severities(LEFTOVER, LeftoversSample(on={"0000:3b:00.0": (allowed,)}), at) == ["healthy"]
    assert said(LEFTOVER, LeftoversSample(on={"0000:3b:00.0": (allowed, mine), "b": ()}), at) == [
        ("drain", "0000:3b:00.0", "1 leftover processes: python (77)")
    ]


def bus(root: Path, *devices: tuple[str, str, str]) -> Path:
    for name, vendor, kind in devices:
        place = root / "sys/bus/pci/devices" / name
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "class").write_text(f"{kind}\n")
    return root


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    root = bus(
        tmp_path, ("0000:3b:00.0", "0x10de", "0x030200"), ("0000:5d:00.0", "0x10de", "0x030000"),
        ("0000:5e:00.0", "0x10de", "0x068000"), ("0000:5f:00.0", "0x15b3", "0x020700"),
    )  # fmt: skip
    assert on_bus(root) == 2, "neither a switch nor another maker's adapter"
    assert on_bus(tmp_path / "none") == 0


def test_a_node_without_gpus_has_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="none is expected"):
        take(0, tmp_path)
    with pytest.raises(FileNotFoundError, match="are unknown"):
        take(None, tmp_path)
    (tmp_path / "sys/bus").mkdir(parents=True)
    with pytest.raises(AbsentError, match="the settings expect none"):
        take(None, tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()  # the bus is hidden
    assert take(None, tmp_path).trouble or take(None, tmp_path).gpus


DRIVER = r"""
#include <string.h>
typedef void *dev;
int nvmlInitWithFlags(unsigned f) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "550.54.15", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned k, dev *d) {
  *d = (dev)(unsigned long)(k + 1);
  return k == 1 ? 15 : 0; /* the second one is lost */
}
int nvmlDeviceGetName(dev d, char *s, unsigned n) { strncpy(s, "NVIDIA H100", n); return 0; }
int nvmlDeviceGetUUID(dev d, char *s, unsigned n) { strncpy(s, "GPU-1", n); return 0; }
int nvmlDeviceGetTemperature(dev d, int sensor, unsigned *t) { *t = 45; return 0; }
int nvmlDeviceGetEccMode(dev d, int *now, int *later) { *now = *later = 1; return 0; }
int nvmlDeviceGetTotalEccErrors(dev d, int kind, int counter, unsigned long long *n) {
  *n = kind == 1 ? (counter ? 5 : 2) : 1000;
  return 0;
}
int nvmlDeviceGetRemappedRows(dev d, unsigned *c, unsigned *u, unsigned *p, unsigned *f) {
  *c = 9; *u = 3; *p = 1; *f = 0;
  return 0;
}
int nvmlDeviceGetPowerUsage(dev d, unsigned *mw) { return 999; } /* unknown error */
int nvmlDeviceGetCurrPcieLinkWidth(dev d, unsigned *w) { *w = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(dev d, unsigned *w) { *w = 16; return 0; }
int nvmlDeviceGetNvLinkState(dev d, unsigned link, unsigned *on) {
  *on = link != 1;
  if (d == (dev)3 && link == 2) return 999; /* unknown error */
  return link < 4 ? 0 : 2; /* invalid argument: it has four */
}
int nvmlDeviceGetNvLinkErrorCounter(dev d, unsigned link, int kind, unsigned long long *n) {
  *n = link + kind;
  return kind < 3 ? 0 : 3; /* not supported */
}
const char *nvmlErrorString(int code) { return "an error of the test's driver"; }
"""
ASK = (
    "import msgspec, sys\nfrom outlast.health.checks.gpu_probe import take\n"
    "sys.stdout.buffer.write(msgspec.json.encode(take(2)))\n"
)


@pytest.mark.process
def test_errors_of_a_real_nvml_library_are_distinguished(tmp_path: Path) -> None:
    """A library of NVML's name, built here: what it says, has not, or fails at, is told apart."""
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "nvml.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True, timeout=60
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, check=True, timeout=60,
        env={"LD_LIBRARY_PATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    sample = msgspec.json.decode(done.stdout, type=GpusSample)
    assert sample.trouble == "" and sample.driver == "550.54.15"
    one, lost, halved = sample.gpus
    assert lost.lost
    assert ("now", "GPU 1") in [each[:2] for each in said(CHECK, sample, about())]
    assert (one.name, one.uuid, one.temperature_c, one.ecc) == ("NVIDIA H100", "GPU-1", 45, True)
    assert (one.uncorrected, one.uncorrected_ever) == (2, 5)
    assert (one.remapped, one.remap_pending, one.remap_failed) == (3, True, False)
    assert (one.width, one.width_max, one.speed, one.memory_c) == (8, 16, None, None)
    assert [(link.active, link.errors) for link in one.nvlinks] == [
        (True, 3), (False, 6), (True, 9), (True, 12),
    ]  # fmt: skip
    assert list(one.unread) == ["power"]
    assert list(halved.unread) == ["power", "NVLinks"], "not that it has no more than two"


def test_a_driver_that_is_not_there_is_unknown(tmp_path: Path) -> None:
    root = bus(tmp_path, ("0000:3b:00.0", "0x10de", "0x030200"))
    sample = take(None, root)
    if not sample.trouble:
        pytest.skip("this machine has a driver")
    assert severities(CHECK, sample, about()) == ["unknown"]
