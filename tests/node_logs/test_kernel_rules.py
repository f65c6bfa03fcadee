"""Rules of kernel messages other than NVIDIA's."""

from __future__ import annotations

import pytest
from tests.node_logs.log_samples import found, read

from outlast.node_logs.kernel_log import RULES, _compiled

SAID = {
    ("kernel.oom", "warn"): """
        python | Out of memory: Killed process 1234 (python) total-vm:1kB
        a b | Memory cgroup out of memory: Killed process 77 (a b) total-vm:1kB""",
    ("kernel.memory", "warn"): """
        MC0 | EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1)""",
    ("kernel.memory", "now"): """
        MC1 | EDAC MC1: 2 UE memory scrubbing error on unknown memory
        0x1f5a | Memory failure: 0x1f5a: Killing python:1 due to hardware memory corruption""",
    ("kernel.memory", "drain"): """
        0x1f5a | Memory failure: 0x1f5a: recovery action for clean LRU page: Recovered""",
    ("kernel.mce", "warn"): """
        | mce: [Hardware Error]: Machine check events logged
        24 | mce: [Hardware Error]: CPU 24: Machine Check: 0 Bank 7: 8c00004000010092""",
    ("kernel.mce", "now"): """
        3 | mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400""",
    ("kernel.ghes", "warn"): "| {1}[Hardware Error]: event severity: corrected",
    ("kernel.ghes", "now"): "| {1}[Hardware Error]: event severity: fatal",
    ("kernel.aer", "warn"): """
        0000:01:00.0 | pcieport 0000:00:01.0: AER: Corrected error received: 0000:01:00.0
        0000:01:00.0 | pcieport 0:0: AER: Correctable error message received from 0000:01:00.0
        0000:3b:00.0 | nvidia 0000:3b:00.0: PCIe Bus Error: severity=Corrected, type=P""",
    ("kernel.aer", "drain"): """
        3b:0 | nvidia 3b:0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction""",
    ("kernel.aer", "now"): """
        0000:01:00.0 | pcieport 0:0: AER: Multiple Uncorrected (Fatal) error received: 0000:01:00.0
        0000:3b:00.0 | nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=T
        0000:16:01.0 | pcieport 0000:16:01.0: pciehp: Slot(5): Link Down""",
    ("kernel.ext4", "drain"): "sda1 | EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2",
    ("kernel.ext4", "now"): "sda1 | EXT4-fs (sda1): Remounting filesystem read-only",
    ("kernel.xfs", "drain"): "dm-0 | XFS (dm-0): Corruption detected. Unmount and run xfs_repair",
    ("kernel.xfs", "now"): "dm-0 | XFS (dm-0): Filesystem has been shut down due to log error",
    ("kernel.nfs", "warn"): "10.0.0.5 | nfs: server 10.0.0.5 not responding, still trying",
    ("kernel.nfs", "now"): "fs1 | nfs: server fs1 not responding, timed out",
    ("kernel.nfs", "healthy"): "fs1 | nfs: server fs1 OK",
    ("kernel.lustre", "warn"): """
        fs-OST1 | Lustre: fs-OST1-osc-ff: Connection to fs-OST1 (at 10.0.0.1@o2ib) was lost; in
        | LustreError: 11-0: fs-OST1-osc-ff: operation ost_read failed: rc = -107""",
    ("kernel.lustre", "now"): "fs-M | LustreError: 167-0: x: This client was evicted by fs-M; in",
    ("kernel.lustre", "healthy"): "fs-O | Lustre: fs-O-osc-ff: Connection restored to fs-O (at x)",
    ("kernel.block", "now"): """
        sda | blk_update_request: I/O error, dev sda, sector 12345
        dm-12 | I/O error, dev dm-12, sector 123 op 0x0:(READ) flags 0x0
        nvme1n1 | critical medium error, dev nvme1n1, sector 10""",
    ("kernel.block", "drain"): "sda1 | Buffer I/O error on dev sda1, logical block 5",
    ("kernel.nvme", "warn"): "nvme0 | nvme nvme0: I/O 123 QID 4 timeout, aborting",
    ("kernel.nvme", "drain"): "nvme0 | nvme nvme0: controller is down; will reset: CSTS=0xffffffff",
    ("kernel.nvme", "now"): "nvme0 | nvme nvme0: Removing after probe failure status: -19",
    ("kernel.iblink", "now"): """
        ibp94s0 | mlx5_core 0000:5e:00.0 ibp94s0: Link down
        mlx5_0 | mlx5_0: Port: 1 Link DOWN
        0000:5e:00.0 | mlx5_core 0000:5e:00.0: poll_health:739: device's health compromised""",
    ("kernel.iblink", "healthy"): "mlx5_0 | mlx5_0: Port: 1 Link ACTIVE",
    ("kernel.iblink", "warn"): """
        0000:5e:00.0 | mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged""",
    ("kernel.ethlink", "drain"): """
        ens1f0np0 | mlx5_core 0000:5e:00.0 ens1f0np0: Link down
        eth0 | ixgbe 0000:01:00.0 eth0: NIC Link is Down
        eno1 | tg3 0000:02:00.0 eno1: Link is down
        eth0 | bond0: (slave eth0): link status definitely down for interface eth0, disabling it
        eth0 | NETDEV WATCHDOG: eth0 (ixgbe): transmit queue 3 timed out""",
    ("kernel.ethlink", "healthy"): """
        ens1f0np0 | mlx5_core 0000:5e:00.0 ens1f0np0: Link up
        eno1 | igb 0000:06:00.0 eno1: igb: eno1 NIC Link is Up 1000 Mbps Full Duplex""",
    ("kernel.thermal", "warn"): """
        CPU3 | CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)
        CPU3 | mce: CPU3: Package temperature above threshold, cpu clock throttled""",
    ("kernel.thermal", "healthy"): "CPU3 | CPU3: Core temperature/speed normal",
    ("kernel.stuck", "warn"): """
        py | INFO: task py:1234 blocked for more than 120 seconds.
        | rcu: INFO: rcu_sched detected stalls on CPUs/tasks:
        | rcu: INFO: rcu_preempt detected expedited stalls on CPUs/tasks: { 1-... } 6 jiffies
        | rcu: INFO: rcu_sched self-detected stall on CPU""",
    ("kernel.stuck", "drain"): "CPU#3 | watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [x:1]",
    ("kernel.crash", "drain"): """
        | BUG: unable to handle kernel NULL pointer dereference at (null)
        | Oops: general protection fault, probably for address 0xdead: 0000 [#1] PREEMPT SMP""",
    ("kernel.crash", "now"): "| Kernel panic - not syncing: Fatal exception",
    ("kernel.lockup", "now"): "5 | NMI watchdog: Watchdog detected hard LOCKUP on cpu 5",
    ("kernel.clock", "warn"): "tsc | clocksource: Marking clocksource 'tsc' as unstable",
}  # fmt: skip
CASES = [
    (check, severity, *(part.strip() for part in row.split("|", 1)))
    for (check, severity), rows in SAID.items()
    for row in rows.strip().splitlines()
]


@pytest.mark.parametrize(("check", "severity", "device", "said"), CASES)
def test_a_line_means(check: str, severity: str, device: str, said: str) -> None:
    (one,) = found(read(f"[ 1.0] {said}"))
    assert (one.check, one.severity, one.device) == (check, severity, device)
    assert one.code == "" and one.detail == said


def test_every_rule_has_a_test_case() -> None:
    for rule in RULES:
        assert _compiled(rule.pattern).groups <= 1
    assert {rule.check for rule in RULES} == {check for check, *_ in CASES}


def test_out_of_memory_is_the_users_own() -> None:
    (one,) = found(read("[ 1.0] Out of memory: Killed process 1234 (python) total-vm:1kB"))
    assert (one.symptom, one.severity) == ("oom", "warn")


def test_carrier_changes_are_read_from_networkd() -> None:
    lines = "\n".join(
        f"Feb 23 16:24:18 gpu7 systemd-networkd[9]: {said}"
        for said in ("ib0: Lost carrier", "eth0: Lost carrier", "ib0: Gained carrier")
    )
    said = [(one.symptom, one.severity) for one in found(read(lines))]
    assert said == [("ib-link", "now"), ("ethlink", "drain"), ("ib-link", "healthy")]
