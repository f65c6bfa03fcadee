"""Reading of kernel logs in all formats: time, host and message."""

from __future__ import annotations

import json
from datetime import timedelta, timezone

import pytest
from tests.node_logs.log_samples import BOOT_NS, READ_NS, XID, XID_NS, found, read, unread

from outlast.node_logs.kernel_log import findings
from outlast.node_logs.log_envelopes import has_known_time
from outlast.node_logs.log_readings import LogClock


def journal(**more: object) -> str:
    entry = {"MESSAGE": XID, "__REALTIME_TIMESTAMP": str(XID_NS // 1000), "_HOSTNAME": "gpu7",
             "SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "kernel"}  # fmt: skip
    return json.dumps({**entry, **more})


@pytest.mark.parametrize(
    ("line", "t_ns"),
    [
        (f"[  201.650687] {XID}", BOOT_NS + 201_650_687_000),
        (f"<3>[  201.650687] {XID}", BOOT_NS + 201_650_687_000),
        (f"kern  :warn  : [  201.650687] {XID}", BOOT_NS + 201_650_687_000),
        (f"[  201.650687] [  T123] {XID}", BOOT_NS + 201_650_687_000),
        (f"4,3964,206764307,-;{XID}", BOOT_NS + 206_764_307_000),
        (f"4,3964,206764307,-,caller=T9;{XID}", BOOT_NS + 206_764_307_000),
        (f"[Sun Feb 23 16:24:18 2025] {XID}", XID_NS),
        (f"2025-02-23T17:24:18,000000+01:00 {XID}", XID_NS),
        (f"2025-02-23T16:24:18+0000 gpu7 kernel: {XID}", XID_NS),
        (f"2025-02-23T16:24:18.25Z gpu7 kernel: [ 12.345678] {XID}", XID_NS + 250_000_000),
        (f"Feb 23 16:24:18 gpu7 kernel: {XID}", XID_NS),
        (f"Feb 23 16:24:18.000007 gpu7 kernel: {XID}", XID_NS + 7000),
        (f"Sun 2025-02-23 16:24:18 UTC gpu7 kernel: {XID}", XID_NS),
        (f"1740327858.500000 gpu7 kernel: {XID}", XID_NS + 500_000_000),
        (journal(), XID_NS),
        (journal(MESSAGE=list(XID.encode())), XID_NS),
        (f"[Sun Feb 23 16:24:18 2025] {XID}\r", XID_NS),
        (f"[Sun Feb 23 16:24:18 2025 <    0.000005>] {XID}", XID_NS),
        (f"[  201.650687 <    0.000005>] {XID}", BOOT_NS + 201_650_687_000),
        (f"\0\0\0Feb 23 16:24:18 gpu7 kernel: {XID}", XID_NS),
        (f"\x1e{journal()}", XID_NS),
    ],
)
def test_every_shape_is_placed(line: str, t_ns: int) -> None:
    (one,) = found(read(line))
    assert one.t_ns == t_ns and has_known_time(line.rstrip())
    assert (one.code, one.severity, one.symptom) == ("XID 79", "now", "gpu-unavailable")
    assert one.device == "0000:9b:00.0" and one.node == "n"
    assert one.detail == "GPU has fallen off the bus. (pid 1234, name python3)"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"[  201.650687] {XID}", "time of boot was not given"),
        (f"Feb 23 16:24:18 gpu7 kernel: {XID}", "when the log was read was not given"),
        (XID, "no time on the line"),
        (f"[Sun Feb 30 16:24:18 2025] {XID}", "no such date"),
        (f"[Sun Foo 23 16:24:18 2025] {XID}", "no such month: Foo"),
        (f"2025-02-23T16:24:18+9900 gpu7 kernel: {XID}", "no such zone"),
        (f"Sun 2025-02-23 16:24:18 CET gpu7 kernel: {XID}", "in the zone CET"),
        (f"[Sun Feb 23 16:24:18 1925] {XID}", "out of any range"),
        (journal(__REALTIME_TIMESTAMP="soon"), "no entry of a journal"),
        (journal(__REALTIME_TIMESTAMP=None), "no time on the line"),
        ('{"MESSAGE": "NVRM: Xid', "no entry of a journal"),
    ],
)
def test_a_line_without_a_usable_time_is_unread(line: str, reason: str) -> None:
    (one,) = list(findings(line, cluster="c", node="n"))
    assert one in unread([one]) and reason in one.reason and one.line == 1  # type: ignore[union-attr]


EXT4 = "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2"


@pytest.mark.parametrize(
    "line",
    [
        f"<3>1 2025-02-23T16:24:18+00:00 gpu7 kernel - - -  {EXT4}",
        f"<3>1 2025-02-23T16:24:18+00:00 gpu7 kernel - - - \ufeff{EXT4}",
        f"<3>1 2025-02-23T16:24:18+00:00 gpu7 kernel - - -  [  123.456] {EXT4}",
        f"Feb 23 16:24:18 gpu7 kernel:  {EXT4}",
        f"Feb 23 16:24:18 gpu7 kernel: [  123.456789][ T1234] {EXT4}",
        f"Feb 23 16:24:18 gpu7 kernel: message repeated 3 times: [ {EXT4}]",
        f"Feb 23 16:24:18 gpu7 kernel: message repeated 3 times: [ [  123.4] {EXT4}]",
        f"\0\0Feb 23 16:24:18 gpu7 kernel: {EXT4}",
        f"\x1e{journal(MESSAGE=EXT4)}",
    ],
)
def test_prefixes_of_a_log_relay_hide_no_finding(line: str) -> None:
    (one,) = found(read(line))
    assert (one.check, one.device, one.t_ns, one.detail) == ("kernel.ext4", "sda1", XID_NS, EXT4)


@pytest.mark.parametrize(
    "prefix", ["[  +0.000005]", "[Feb23 16:24]", "[Feb 3 16:24]", "[<    0.000005>]", "[...]"]
)
def test_a_relative_time_is_no_time_and_hides_no_finding(prefix: str) -> None:
    (one,) = unread(read(f"{prefix} {EXT4}"))
    assert one.reason == "no time on the line"


def test_a_line_without_time_has_the_given_time() -> None:
    (one,) = found(read(XID, bare_ns=5))
    assert one.t_ns == 5


def test_the_time_zone_is_an_argument() -> None:
    west = timezone(timedelta(hours=-8))
    (one,) = findings(
        f"[Sun Feb 23 08:24:18 2025] {XID}", cluster="c", node="n", clock=LogClock(zone=west)
    )
    assert one in found([one]) and one.t_ns == XID_NS  # type: ignore[union-attr]


def test_a_time_without_a_year_is_the_latest_before_the_reading() -> None:
    """The log was read on 24 February 2025: December was last year's, tomorrow is a fast clock."""
    lines = [f"{day} 00:00:00 gpu7 kernel: {XID}" for day in ("Dec 31", "Feb 25", "Feb 29")]
    times = [one.t_ns for one in found(read("\n".join(lines)))]
    day_ns = 86_400 * 10**9
    assert times == [1_735_603_200 * 10**9, 1_740_441_600 * 10**9, 1_709_164_800 * 10**9]
    assert times[1] < READ_NS + day_ns


def test_the_host_is_the_lines_where_the_caller_names_none() -> None:
    assert found(read(journal(), node=""))[0].node == "gpu7"
    assert found(read(f"Feb 23 16:24:18 gpu8 kernel: {XID}", node=""))[0].node == "gpu8"


@pytest.mark.parametrize(
    "line",
    [
        f"Feb 23 16:24:18 gpu7 slurmd[99]: {XID}",
        journal(SYSLOG_IDENTIFIER="logger", _TRANSPORT="syslog"),
        journal(SYSLOG_IDENTIFIER="kernel", _TRANSPORT="syslog"),
        "[ 1.0] IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        "[ 1.0] nvidia-nvswitch2: open (major=510)",
        "[ 1.0] clocksource: Long readout interval, skipping watchdog check: cs_nsec: 1",
        "[ 1.0] NVRM: GPU Board Serial Number: 1650124014249",
        "[Feb 25 2025 13:59:45] [INFO] [tid 1808] multicast group 0 is freed.",
        "",
    ],
)
def test_ordinary_lines_give_no_finding(line: str) -> None:
    assert read(line) == []


@pytest.mark.parametrize(
    ("said", "code", "severity", "device"),
    [
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "XID 14", "warn", "0000:03:00.0"),
        ("NVRM: Xid (PCI:0000:b3:00.0): 79", "XID 79", "now", "0000:b3:00.0"),
        ("NVRM: Xid : 32, pid=2280636", "XID 32", "warn", ""),
        ("NVRM: Xid (PCI:0000:05:00): 99999, unknown error", "XID 99999", "unknown",
         "0000:05:00.0"),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the"
         " bus.", "XID 79", "now", "0000:05:00.0"),
        ("NVRM: GPU 0000:1a:00.0: GPU has fallen off the bus.", "", "now", "0000:1a:00.0"),
        ("NVRM: GPU 0000:1a:00.0: RmInitAdapter failed! (0x26:0xffff:1482)", "", "now",
         "0000:1a:00.0"),
        ("NVRM: rm_init_adapter failed, device minor number 3", "", "now", ""),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted"
         " PRIV error (First)", "SXID 12028", "warn", "0000:05:00.0"),
        ("nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, Fatal, Link 37 LTSSM Fault Up",
         "SXID 20034", "now", "0000:07:00.0"),
    ],
)  # fmt: skip
def test_nvidias_lines(said: str, code: str, severity: str, device: str) -> None:
    (one,) = found(read(f"[ 1.0] {said}"))
    assert (one.code, one.severity, one.device) == (code, severity, device)


@pytest.mark.parametrize(
    "said",
    ["NVRM: Xid (PCI:0000:66:00): abc, pid=1", "NVRM: Xid (PCI:0000:04:00): %d, unknown",
     "NVRM: Xid (invalid): some error", "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): ?, x"],
)  # fmt: skip
def test_an_xid_without_a_number_is_unread(said: str) -> None:
    (one,) = unread(read(f"[ 1.0] {said}"))
    assert "without a number" in one.reason


def test_later_findings_of_a_gpu_have_its_uuid() -> None:
    lines = f"[ 1.0] NVRM: GPU at PCI:0000:9b:00: GPU-509665ad\n[ 1.1] {XID}"
    (one,) = found(read(lines))
    assert one.detail.endswith("[GPU-509665ad]")


def test_the_second_and_third_line_of_a_switchs_error_add_nothing() -> None:
    at = "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 20034, "
    lines = [at + "Fatal, Link 37 LTSSM Fault Up", at + "Severity 1 Engine instance 37",
             at + "Data {0x50610002, 0x10100030}"]  # fmt: skip
    assert len(read("\n".join(f"[ 1.0] {line}" for line in lines))) == 1
    alone = found(read(f"[ 1.0] nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 5, {lines[2][-26:]}"))
    assert [one.severity for one in alone] == ["unknown"]


def test_the_fabric_managers_log() -> None:
    error = "[Feb 27 2025 15:10:02] [ERROR] [tid 12727] "
    lines = error + "detected NVSwitch non-fatal error 12028 on fid 0 on NVSwitch pci bus id" \
        " 00000000:86:00.0 physical id 3 port 61\n" + error + "something else"  # fmt: skip
    first, second = found(read(lines))
    assert (first.code, first.severity, first.device) == ("SXID 12028", "warn", "0000:86:00.0")
    assert first.t_ns == 1_740_669_002 * 10**9 and first.symptom == "nvlink"
    assert second.severity == "unknown" and second.code == ""
    relayed = (
        f"Feb 23 16:24:18 gpu7 nv-fabricmanager[3]: {error}detected NVSwitch fatal error 20034"
    )
    (third,) = found(read(relayed))
    assert (third.code, third.severity, third.t_ns) == ("SXID 20034", "now", XID_NS)


def test_the_firmwares_report_is_no_entry_of_a_journal() -> None:
    (one,) = found(read("{1}[Hardware Error]: event severity: fatal", bare_ns=5))
    assert (one.check, one.severity) == ("kernel.ghes", "now")


def test_a_very_long_line_is_read_in_little_time_and_cut() -> None:
    (one,) = found(read(f"[ 1.0] {XID}" + " x" * 10**6))
    assert len(one.detail) <= 420
