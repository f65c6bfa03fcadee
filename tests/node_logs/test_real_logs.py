"""Logs and tool outputs of real machines, where this machine has them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.node_logs.log_samples import found, read, unread

from outlast.node_logs import dcgm, nvidia_smi
from outlast.node_logs.log_envelopes import has_known_time
from outlast.node_logs.log_readings import Reading, finding_count, fold_storms
from outlast.node_logs.nvidia_errors import disagreements, shipped_policy


@pytest.fixture(scope="module")
def real(traces: Path) -> Path:
    where = traces / "health_fixtures"
    if not where.is_dir():
        pytest.skip("the health fixtures are not among the traces")
    return where


def lines_of(real: Path, name: str) -> str:
    return (real / name).read_text(errors="replace")


def test_a_gpu_whose_firmware_hung(real: Path) -> None:
    readings = read(lines_of(real, "dmesg-with-xid-119.log"))
    told = found(readings)
    assert unread(readings) == [] and {one.device for one in told} == {"0000:9b:00.0"}
    assert Counter(one.code for one in told) == {"XID 119": 5, "": 1}
    assert {one.severity for one in told} == {"now"} and told[0].t_ns == 1_740_327_858 * 10**9
    assert all("GPU-509665ad" in one.detail for one in told)
    assert sorted(
        finding_count(one) for one in fold_storms(readings, 3600) if one in found([one])
    ) == [1, 5]  # type: ignore[arg-type]


def test_a_crash_on_purpose_and_a_quiet_machine(real: Path) -> None:
    crash = found(read(lines_of(real, "dmesg-erst.txt")))
    assert [(one.check, one.symptom) for one in crash] == [("kernel.crash", "services")]
    quiet = lines_of(real, "kmsg.1.log")
    assert read(quiet) == [] and all(has_known_time(line) for line in quiet.splitlines())


def test_the_fabric_manager(real: Path) -> None:
    (one,) = found(read(lines_of(real, "fabricmanager.log")))
    assert (one.code, one.severity, one.device) == ("SXID 12028", "warn", "0000:86:00.0")


def test_lines_with_xids(real: Path) -> None:
    """The collection also holds patterns and formats out of programs: they have no number."""
    lines = [line.split("\t", 1)[1] for line in lines_of(real, "xid_lines.tsv").splitlines()]
    readings = read("\n".join(lines), bare_ns=5)
    no_line = {"NVRM: Xid \\", "NVRM: Xid (invalid", "NVRM: Xid error", "NVRM: Xid'", "%d", "%s",
               "abc, pid", "INVALID, pid"}  # fmt: skip
    assert all(any(words in one.text for words in no_line) for one in unread(readings))
    codes = Counter(one.code for one in found(readings))
    assert codes["XID 79"] == 29 and codes["XID 149"] == 29 and codes["XID 13"] == 21
    assert codes["XID 119"] == 16 and codes["XID 31"] == 10 and codes["XID 154"] == 7
    placed = [one for one in lines if "NVRM: GPU at" not in one]
    assert len(found(readings)) + len(unread(readings)) == len(placed)
    seconds = {one.t_ns for one in found(readings)}
    assert {"unknown"} == {one.severity for one in found(readings) if "99" in one.code[4:]}
    assert len(seconds) > 20


def test_lines_of_switches(real: Path) -> None:
    lines = lines_of(real, "sxid_lines.txt").splitlines()
    told = [found(read(line, bare_ns=5)) for line in lines]
    assert all(len(one) == 1 for one in told)
    for line, (one,) in zip(lines, told, strict=True):
        assert one.code.split()[1] in line and one.symptom == "nvlink"
        assert one.severity == "now" if ", Fatal" in line else one.severity != "healthy"
        assert one.severity == "warn" or "Non-fatal" not in line


def test_the_policy_agrees_with_its_sources(real: Path) -> None:
    told = json.loads(lines_of(real, "xid_policy_conflicts.json"))
    for code, said in told.items():
        says = shipped_policy().xid[int(code)].says
        assert says["nvidia"] == said["nvidia"] and says["gpud"] == said["gpud"].lower()
        assert (says["gcm"] == "critical") == (said["gcm"] == "CRITICAL")
        assert says["k8s"] == said["k8s_dp"]
        assert (says["azure"] == "drain") == (said["azure"] == "drain")
    assert sum(disagreements(int(code)) is not None for code in told) >= 15


@pytest.mark.parametrize(
    ("name", "level", "severities"),
    [("DCGMIDiag_r1_results.json", 1, ["healthy"]), ("DCGMIDiag_r2_results.json", 2, ["healthy"]),
     ("DCGMIDiag_r3_results.json", 3, ["unknown"]),
     ("DCGMIHealthCheckResults.json", None, ["healthy"]),
     ("DCGMIIncorrectresults.json", 2, ["drain"]), ("DCGMIDmonResults.txt", None, ["unknown"])],
)  # fmt: skip
def test_diagnostics(real: Path, name: str, level: int | None, severities: list[str]) -> None:
    text = lines_of(real, name)
    readings: list[Reading] = list(dcgm.findings(text, cluster="c", node="n", t_ns=7, level=level))
    assert [one.severity for one in found(readings)] == severities


def test_eight_gpus(real: Path) -> None:
    text = lines_of(real, "query-gpu-8xH100.csv")
    got = nvidia_smi.read_samples(text, t_ns=7)
    assert [one.index for one in got.samples] == list(range(8)) and not got.unread
    assert {one.name for one in got.samples} == {"NVIDIA H100 80GB HBM3"}
    assert got.samples[0].power_w == 70.89 and got.samples[3].pci == "0000:69:00.0"
    limits = nvidia_smi.GpuLimits(gpus=8, must=["uncorrected", "temperature_c", "pcie_width"])
    assert list(nvidia_smi.findings(text, cluster="c", node="n", t_ns=7, limits=limits)) == []
