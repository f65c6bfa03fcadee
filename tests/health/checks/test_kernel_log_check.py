"""Kernel log check since a mark: new, lost, ignored and persistent events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.health.judged_samples import SECOND_NS, T0_NS, about, after, found, said, severities

from outlast.health.check_memory import CheckMemory
from outlast.health.checks import kernel_log_check as probe
from outlast.health.checks.kernel_log_check import CHECK, KernelLogSample
from outlast.node_logs.log_readings import finding_count
from outlast.node_logs.nvidia_errors import shipped_policy

BOOT_NS = T0_NS - 10_000 * SECOND_NS
XID79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
OOM = "Out of memory: Killed process 77 (python) total-vm:1kB"


def log(*messages: tuple[float, str], first: int = 0, boot: str = "b") -> KernelLogSample:
    """Messages at seconds after T0, as /dev/kmsg has them."""
    lines = tuple(
        (first + k, f"3,{first + k},{round((t_s + 10_000) * 1e6)},-;{text}")
        for k, (t_s, text) in enumerate(messages)
    )
    return KernelLogSample(
        boot=boot, boot_ns=BOOT_NS, source="kmsg", first=first, last=first + len(lines) - 1,
        cut=first > 0, lines=lines,
    )  # fmt: skip


def test_an_xid_is_a_finding_with_its_code_and_device_and_time() -> None:
    (one,) = found(CHECK, log((-5, "quiet"), (-2, XID79)), about())
    assert (one.severity, one.code, one.device) == ("now", "XID 79", "0000:3b:00.0")
    assert one.check == "kernel.xid" and one.node == "n1" and one.cluster == "c"
    assert one.t_ns == T0_NS - 2 * SECOND_NS


def test_without_a_mark_only_the_last_hour_counts() -> None:
    assert severities(CHECK, log((-3601, XID79)), about()) == ["healthy"]
    assert severities(CHECK, log((-3599, XID79)), about()) == ["now"]
    assert severities(CHECK, log((-99, XID79)), about(kernel={"window_s": 60})) == ["healthy"]


def test_a_log_is_read_from_its_mark_and_anew_after_a_boot() -> None:
    first = log((-2, XID79))
    memory = after(CHECK, first, about(CheckMemory()), boot="b")
    later = log((-2, XID79), (30, "quiet"))
    assert severities(CHECK, later, about(memory, 60)) == ["healthy"]
    more = log((-2, XID79), (30, OOM))
    assert severities(CHECK, more, about(memory, 60)) == ["warn"]
    rebooted = log((40, XID79), boot="another")
    assert severities(CHECK, rebooted, about(memory, 60)) == ["now"]


@pytest.mark.parametrize("source", ["kmsg", "journal"])
def test_an_empty_log_is_unknown(source: str) -> None:
    """As /dev/kmsg of a container that may not read it: nothing of trouble was said of no line."""
    empty = msgspec.structs.replace(log(), source=source)
    (one,) = said(CHECK, empty, about())
    assert one[0] == "unknown" and "has no readable line" in one[2]
    memory = after(CHECK, log((-2, "quiet")), about(CheckMemory()), boot="b")
    assert severities(CHECK, log(), about(memory, 60)) == ["unknown"]
    kept = after(CHECK, log(), about(memory, 60), boot="b")
    assert kept.counters == memory.counters, "the mark stays where it was"


def test_a_log_that_ends_before_its_mark_is_unknown() -> None:
    memory = after(CHECK, log((-2, "quiet"), (-1, "quiet")), about(CheckMemory()), boot="b")
    (one,) = said(CHECK, log((-2, "quiet")), about(memory, 60))
    assert one[0] == "unknown" and "was read to 1" in one[2]


def test_overwritten_kernel_lines_are_reported() -> None:
    memory = after(CHECK, log((-2, "quiet"), (-1, "quiet")), about(CheckMemory()), boot="b")
    lost = log((30, "quiet"), first=7)
    assert said(CHECK, lost, about(memory, 60))[0] == (
        "unknown", "", "the kernel overwrote 5 lines before they were read",
    )  # fmt: skip


def test_a_log_that_does_not_go_back_to_the_window_is_unknown() -> None:
    young = log((-60, "quiet"), (-1, "quiet"), first=700)
    assert severities(CHECK, young, about()) == ["unknown"]
    assert severities(CHECK, young, about(kernel={"window_s": 59})) == ["healthy"]
    assert severities(CHECK, log((-60, "quiet")), about()) == ["healthy"], "it is all there was"


def test_a_truncated_journal_is_unknown() -> None:
    def journal(*t_s: float, cut: bool) -> KernelLogSample:
        numbers = [round((each + 10_000) * 1e6) for each in t_s]
        return KernelLogSample(
            boot="b", boot_ns=BOOT_NS, source="journal", first=numbers[0], last=numbers[-1],
            cut=cut, lines=tuple((number, '{"MESSAGE": "quiet"}') for number in numbers),
        )  # fmt: skip

    assert severities(CHECK, journal(-60, -1, cut=True), about()) == ["unknown"]
    assert severities(CHECK, journal(-60, -1, cut=False), about()) == ["healthy"]
    memory = after(CHECK, journal(-60, -1, cut=False), about(CheckMemory()), boot="b")
    assert severities(CHECK, journal(-60, 9, cut=True), about(memory, 60)) == ["healthy"]
    assert severities(CHECK, journal(5, 9, cut=True), about(memory, 60)) == ["unknown"]


KERNEL = '"MESSAGE":"quiet","_TRANSPORT":"kernel"'
JOURNALCTL = f"""#!/bin/sh
echo '{{"__MONOTONIC_TIMESTAMP":"9","__REALTIME_TIMESTAMP":"5",{KERNEL}}}'
echo '{{"__MONOTONIC_TIMESTAMP":"7","__REALTIME_TIMESTAMP":"8",{KERNEL}}}'
printf '{{"__MONOTON'
"""


@pytest.mark.parametrize("kmsg", ["/nowhere/kmsg", "/dev/null"])
def test_a_journal_is_read_where_kmsg_may_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kmsg: str
) -> None:
    """By the time since boot: the time of day was set back between the two."""
    (tmp_path / "journalctl").write_text(JOURNALCTL)
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(probe, "KMSG", Path(kmsg))
    sample = probe.take()
    assert [number for number, _ in sample.lines] == [7, 9]
    assert (sample.source, sample.first, sample.last, sample.cut) == ("journal", 7, 9, False)


def test_a_journal_without_a_line_is_no_journal_of_this_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journalctl").write_text("#!/bin/sh\n")
    (tmp_path / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(probe, "KMSG", Path("/dev/null"))
    with pytest.raises(PermissionError, match="no line of this boot"):
        probe.take()


def test_a_server_that_answers_again_is_no_longer_a_fault() -> None:
    gone, back = "nfs: server fs1 not responding, timed out", "nfs: server fs1 OK"
    assert severities(CHECK, log((-9, gone)), about()) == ["now"]
    assert severities(CHECK, log((-9, gone), (-5, back)), about()) == ["healthy", "healthy"]
    assert severities(CHECK, log((-9, back), (-5, gone)), about()) == ["now"]


def test_a_link_that_came_up_again_is_a_warning_that_it_went_down() -> None:
    down, up = "mlx5_core 0000:5e:00.0 ib0: Link down", "mlx5_core 0000:5e:00.0 ib0: Link up"
    assert severities(CHECK, log((-9, down)), about()) == ["now"]
    assert severities(CHECK, log((-9, down), (-5, up)), about()) == ["warn"]
    assert severities(CHECK, log((-9, down), (-5, up), (-4, down)), about()) == ["now"]
    assert severities(CHECK, log((-9, up)), about()) == ["healthy", "healthy"]
    assert severities(CHECK, log((-9, down)), about(links={"ignore": ["ib0"]})) == ["healthy"]


def test_a_storm_is_one_finding() -> None:
    (one,) = found(CHECK, log(*[(-60 + k / 100, XID79) for k in range(5000)]), about())
    assert finding_count(one) == 5000


def test_ignored_checks_and_codes_give_no_findings() -> None:
    both = log((-3, XID79), (-2, OOM))
    assert severities(CHECK, both, about(kernel={"ignore": ["XID 79", "kernel.oom"]})) == [
        "healthy"
    ]


def test_another_policy_decides() -> None:
    policy = shipped_policy()
    mild = msgspec.structs.replace(
        policy, xid={79: msgspec.structs.replace(policy.xid[79], severity="warn")}
    )
    assert severities(CHECK, log((-2, XID79)), about()._replace(policy=mild)) == ["warn"]


def test_a_line_that_cannot_be_placed_is_unknown() -> None:
    odd = KernelLogSample(
        boot="b", boot_ns=BOOT_NS, source="kmsg", first=0, last=0,
        lines=((0, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),),
    )  # fmt: skip
    (one,) = found(CHECK, odd, about())
    assert one.severity == "unknown" and "no time on the line" in one.detail


def test_a_real_log(fixtures: Path) -> None:
    """Lines of a machine with XID 119: seconds since boot, long before."""
    text = (fixtures / "dmesg-with-xid-119.log").read_text("utf-8", "replace").splitlines()
    sample = KernelLogSample(
        boot="b", boot_ns=BOOT_NS, source="kmsg", first=0, last=len(text) - 1,
        lines=tuple(enumerate(text)),
    )  # fmt: skip
    all_of_it = about(kernel={"window_s": 1e8})
    assert {one.code for one in found(CHECK, sample, all_of_it) if one.code} >= {"XID 119"}
