"""Handmade log lines and tool outputs in the formats of real machines."""

from __future__ import annotations

import json

from outlast.log_records import Finding
from outlast.node_logs.kernel_log import findings
from outlast.node_logs.log_readings import LogClock, Reading, UnreadText

BOOT_NS = 1_700_000_000 * 10**9
READ_NS = 1_740_400_000 * 10**9  # 2025-02-24 12:26:40 UTC
XID_NS = 1_740_327_858 * 10**9  # 2025-02-23 16:24:18 UTC
XID = "NVRM: Xid (PCI:0000:9b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."


def read(text: str, node: str = "n", bare_ns: int | None = None) -> list[Reading]:
    return list(findings(text, cluster="c", node=node, clock=LogClock(BOOT_NS, READ_NS, bare_ns)))


def found(readings: list[Reading]) -> list[Finding]:
    return [one for one in readings if isinstance(one, Finding)]


def unread(readings: list[Reading]) -> list[UnreadText]:
    return [one for one in readings if isinstance(one, UnreadText)]


def diagnostic(root: str, *tests: tuple[str, str], **result: object) -> str:
    """Return dcgmi output with a result for each test and status."""
    told = [{"name": name, "results": [{"status": status, **result}]} for name, status in tests]
    return json.dumps({root: {"test_categories": [{"category": "any", "tests": told}]}})


DEPLOYED = (
    "Denylist", "NVML Library", "CUDA Main Library", "Permissions and OS Blocks",
    "Persistence Mode", "Environment Variables", "Page Retirement/Row Remap",
    "Graphics Processes", "Inforom",
)  # fmt: skip

SMI_CSV = """\
timestamp, index, name, pci.bus_id, temperature.gpu, power.draw [W], pcie.link.width.current, \
pcie.link.width.max, ecc.errors.uncorrected.volatile.total, remapped_rows.pending, fan.speed [%]
2025/02/23 16:24:18.500, 0, NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 41, 70.89 W, 16, 16, 0, No, [N/A]
2025/02/23 16:24:18.600, 1, NVIDIA H100 80GB HBM3, 00000000:43:00.0, 93, 700.10 W, 8, 16, 2, Yes, [N/A]
2025/02/23 16:24:18.700, 2, NVIDIA H100 80GB HBM3, 00000000:52:00.0, [GPU is lost], \
[Unknown Error], [N/A], [Not Supported], [N/A], [N/A], [N/A]
"""  # noqa: E501

SMI_XML = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <timestamp>Sun Feb 23 16:24:18 2025</timestamp>
  <driver_version>550.90.07</driver_version>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:1B:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <uuid>GPU-aaaa</uuid>
    <pci><pci_bus_id>00000000:1B:00.0</pci_bus_id><pci_gpu_link_info>
      <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width>
      </link_widths></pci_gpu_link_info></pci>
    <clocks_event_reasons>
      <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
    </clocks_event_reasons>
    <ecc_errors><volatile><sram_correctable>3</sram_correctable>
      <sram_uncorrectable_parity>1</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
      <dram_correctable>4</dram_correctable><dram_uncorrectable>5</dram_uncorrectable></volatile>
    </ecc_errors>
    <remapped_rows><remapped_row_failure>No</remapped_row_failure></remapped_rows>
    <temperature><gpu_temp>41 C</gpu_temp></temperature>
    <processes><process_info><pid>1</pid></process_info>
      <process_info><pid>2</pid></process_info></processes>
  </gpu>
  <gpu id="00000000:43:00.0">
    <uuid>GPU-bbbb</uuid>
    <ecc_errors><volatile><double_bit><device_memory>1</device_memory><total>2</total></double_bit>
    </volatile></ecc_errors>
    <temperature><gpu_temp>N/A</gpu_temp></temperature>
    <performance_state>P0</performance_state>
  </gpu>
</nvidia_smi_log>
"""

LINKS = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
         Link 0: 25 GB/s
         Link 1: <inactive>
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb)
         Link 0: 12.5 GB/s
         Link 1: 25 GB/s
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-cccc)
         Link 0: <inactive>
"""

SEL = """\
   1 | 04/12/2023 | 10:15:32 | Memory #0x87 | Correctable ECC | Asserted
   2 | 04/12/2023 | 10:15:33 | Memory DIMM_A1 | Uncorrectable ECC (UnCorrectable ECC | DIMMA1) | \
Asserted
   3 | 04/12/23 | 10:16:01 UTC | Critical Interrupt #0x90 | Bus Fatal Error | Asserted
   4 | 04/12/23 | 10:16:02 PM UTC | Temperature Inlet | Upper Critical going high | Asserted
   5 | 04/12/23 | 10:17:02 UTC | Temperature Inlet | Upper Critical going high | Deasserted
   6 | 04/12/2023 | 10:18:00 | OS Boot | C: boot completed | Asserted
   7 |  Pre-Init  |0000000004| Processor CPU1 | IERR | Asserted
   8 | 04/12/2023 | 10:19:00 | OEM Gizmo #0x11 | Something | Asserted
   a | 04/12/2023 | 10:20:00 | Event Logging Disabled SEL | Log full | Asserted
"""

SMALL = (XID, SMI_CSV, SMI_XML, LINKS, SEL, diagnostic("DCGM Diagnostic", ("PCIe", "Fail")))
