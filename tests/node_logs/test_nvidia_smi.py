"""Reading of nvidia-smi CSV and XML: columns, missing values and faults."""

from __future__ import annotations

import msgspec
import pytest
from tests.node_logs.log_samples import SMI_CSV, SMI_XML, XID_NS, found, unread

from outlast.node_logs.gpu_samples import GpuLimits, GpuSample, troubles
from outlast.node_logs.log_readings import Reading
from outlast.node_logs.nvidia_smi import findings, read_samples


def read(text: str, **limits: object) -> list[Reading]:
    told = msgspec.convert(limits, GpuLimits)
    return list(findings(text, cluster="c", node="n", t_ns=7, limits=told))


def test_csv_values_have_units_and_addresses_one_form() -> None:
    first, hot, lost = read_samples(SMI_CSV, t_ns=7).samples
    assert (first.index, first.pci, first.power_w, first.remap_pending) == (
        0, "0000:1b:00.0", 70.89, False,
    )  # fmt: skip
    assert first.t_ns == XID_NS + 500_000_000
    assert hot.temperature_c == 93 and hot.pcie_width == 8 and hot.uncorrected == 2
    assert lost.broken == {"temperature_c": "[GPU is lost]", "power_w": "[Unknown Error]"}
    assert lost.silent == ("pcie_width", "pcie_width_max", "uncorrected", "remap_pending")
    assert first.rest == {"fan.speed": "[N/A]"}


def test_csv_troubles() -> None:
    told = [(one.device[5:7], one.symptom, one.severity) for one in found(read(SMI_CSV))]
    assert sorted(told) == [
        ("43", "gpu-memory", "drain"), ("43", "gpu-memory", "now"), ("43", "pcie", "drain"),
        ("43", "thermal", "warn"), ("52", "gpu-unavailable", "now"),
        ("52", "gpu-unavailable", "unknown"),
    ]  # fmt: skip


def test_a_required_field_that_is_not_reported_is_unknown() -> None:
    told = found(read(SMI_CSV, must=["pcie_width", "fabric"]))
    missing = [one for one in told if one.detail.endswith("not reported")]
    assert len(missing) == 4 and {one.severity for one in missing} == {"unknown"}


def test_too_few_gpus() -> None:
    (one,) = [one for one in found(read(SMI_CSV, gpus=8)) if one.device == ""]
    assert (one.symptom, one.severity, one.detail) == ("gpu-unavailable", "now", "3 of 8 GPUs")
    assert [one for one in found(read(SMI_CSV, gpus=3)) if one.device == ""] == []


def test_xml_is_flattened_and_its_errors_summed() -> None:
    first, second = read_samples(SMI_XML, t_ns=7).samples
    assert first.t_ns == XID_NS and first.driver == "550.90.07" and first.pci == "0000:1b:00.0"
    assert (first.corrected, first.uncorrected, first.hw_thermal) == (7, 6, True)
    assert (first.pcie_width, first.temperature_c, first.remap_failed) == (16, 41, False)
    assert (second.index, second.uncorrected, second.state) == (1, 2, "P0")
    assert second.silent == ("temperature_c",) and second.pci == "0000:43:00.0"


def test_xml_with_entities_is_refused_whole() -> None:
    bomb = SMI_XML.replace(
        '"nvsmi_device_v12.dtd"', '"x" [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]'
    ).replace("GPU-aaaa", "&b;")
    readings = read(bomb)
    assert "entities" in unread(readings)[0].reason
    assert [one.severity for one in found(readings)] == ["unknown"]
    assert read_samples(SMI_XML.replace("GPU-aaaa", "&b;"), t_ns=7).samples == []


def test_truncated_xml_and_missing_gpus_are_reported() -> None:
    assert "cut off" in unread(read(SMI_XML[:900]))[0].reason
    fewer = read(SMI_XML.replace("<attached_gpus>2", "<attached_gpus>8"))
    assert unread(fewer)[0].reason == "8 GPUs are attached, 2 are in the XML"


@pytest.mark.parametrize(
    ("text", "symptom"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
         "gpu-driver"),
        ("Failed to initialize NVML: Driver/library version mismatch", "gpu-driver"),
        ("No devices were found", "gpu-unavailable"),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error",
         "gpu-unavailable"),
    ],
)  # fmt: skip
def test_a_failure_as_a_whole(text: str, symptom: str) -> None:
    told = found(read(text))
    assert {(one.symptom, one.severity) for one in told} == {(symptom, "now")}


def test_rows_without_a_header_or_of_another_length_are_unread() -> None:
    assert [one.reason for one in unread(read("0, 41, 70"))] == ["no header before it"]
    short = read("index, temperature.gpu\n0\n1, 41\n")
    assert [(one.line, one.reason) for one in unread(short)] == [(2, "1 values for 2 columns")]
    assert [one.severity for one in found(read(""))] == ["unknown"]


def test_a_gpu_that_is_well_has_no_trouble() -> None:
    well = GpuSample(
        t_ns=0, temperature_c=60.0, pcie_width=16.0, pcie_width_max=16.0, uncorrected=0.0,
        pcie_generation=1.0, pcie_generation_max=5.0, busy_percent=0.0, state="P0", ecc_on=True,
        remap_failed=False, fabric="Completed", recovery="None", uncorrected_ever=9.0,
    )  # fmt: skip
    assert list(troubles(well, GpuLimits())) == []
    at_work = msgspec.structs.replace(well, busy_percent=99.0)
    assert [one[:2] for one in troubles(at_work, GpuLimits())] == [("pcie", "warn")]


@pytest.mark.parametrize(
    ("field", "value", "severity"),
    [("remap_failed", True, "now"), ("fabric", "In Progress", "unknown"),
     ("recovery", "Odd", "unknown"), ("fabric", "Failure", "drain"), ("recovery", "Reboot", "now"),
     ("ecc_on", False, "warn"),
     ("recovery", "Drain P2P", "drain"), ("hw_power_brake", True, "drain")],
)  # fmt: skip
def test_a_trouble_each(field: str, value: object, severity: str) -> None:
    sample = msgspec.convert({"t_ns": 0, field: value}, GpuSample)
    assert [one[1] for one in troubles(sample, GpuLimits())] == [severity]


def test_limits_are_the_sites_own() -> None:
    sample = GpuSample(t_ns=0, temperature_c=60.0, corrected=11.0)
    assert [one[0] for one in troubles(sample, GpuLimits(temperature_c=50.0, corrected=10.0))] == [
        "thermal", "gpu-memory",
    ]  # fmt: skip
