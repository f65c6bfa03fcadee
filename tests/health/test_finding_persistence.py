"""Findings of events from one check to the next: duration, end and age."""

from __future__ import annotations

import msgspec
from tests.health.checks.test_kernel_log_check import OOM, XID79, log
from tests.health.judged_samples import SECOND_NS, T0_NS, about

from outlast.health.check_memory import CheckMemory, StuckProcess
from outlast.health.checks import kernel_log_check
from outlast.health.checks.kernel_log_check import KernelLogSample
from outlast.health.node_report import JudgedSamples, judge_samples, memory_after
from outlast.health.probe_runner import TakenSample

KNOWN = {"kernel": kernel_log_check.CHECK}


def looked(
    memory: CheckMemory, t_s: float, sample: KernelLogSample | None
) -> tuple[JudgedSamples, CheckMemory]:
    at = about(memory, t_s)
    raw = {} if sample is None else {"sample": msgspec.Raw(msgspec.json.encode(sample))}
    late = "" if sample is not None else "no answer within 5.0 s"
    taken = TakenSample(check="kernel", device="", t_ns=at.t_ns, took_s=0.0, late=late, **raw)
    found = judge_samples([taken], KNOWN, at)
    return found, memory_after(memory, found, at, {})


def told(found: JudgedSamples) -> list[tuple[str, str]]:
    return [(one.severity, one.code) for one in found.findings]


def test_an_xid_holds_until_half_an_hour_of_quiet() -> None:
    first, memory = looked(CheckMemory(boot="b"), 0, log((-2, XID79)))
    assert told(first) == [("now", "XID 79")]
    second, memory = looked(memory, 300, log((-2, XID79)))
    assert told(second) == [("healthy", ""), ("now", "XID 79")]
    (held,) = [one for one in second.findings if one.code]
    assert held.t_ns == T0_NS - 2 * SECOND_NS and "302 s ago" in held.detail
    third, _ = looked(memory, 1799, log((-2, XID79)))
    assert told(third) == [("healthy", "")], "1801 s after it happened"


def test_another_of_its_kind_begins_the_time_anew() -> None:
    _, memory = looked(CheckMemory(boot="b"), 0, log((-2, XID79)))
    _, memory = looked(memory, 1000, log((-2, XID79), (900, XID79)))
    found, memory = looked(memory, 2500, log((-2, XID79), (900, XID79)))
    assert ("now", "XID 79") in told(found)
    found, _ = looked(memory, 2701, log((-2, XID79), (900, XID79)))
    assert ("now", "XID 79") not in told(found)


def test_a_finding_of_an_unknown_code_persists() -> None:
    odd = "NVRM: Xid (PCI:0000:3b:00): 99999, pid=1, name=x, something new"
    _, memory = looked(CheckMemory(boot="b"), 0, log((-2, odd)))
    found, _ = looked(memory, 300, log((-2, odd)))
    assert ("unknown", "XID 99999") in told(found)


def test_earlier_findings_persist_while_the_log_is_unreadable() -> None:
    _, memory = looked(CheckMemory(boot="b"), 0, log((-2, XID79)))
    found, memory = looked(memory, 60, None)
    assert told(found) == [("unknown", ""), ("now", "XID 79")]
    found, _ = looked(memory, 120, log((-2, XID79), (70, OOM)))
    assert told(found) == [("warn", ""), ("now", "XID 79")]


def test_a_reboot_ends_it() -> None:
    _, memory = looked(CheckMemory(boot="b"), 0, log((-2, XID79)))
    found, memory = looked(memory, 600, log((500, "quiet"), boot="later"))
    assert told(found) == [("healthy", "")]
    assert memory.boot == "later" and memory.findings == {}


def test_a_server_that_answers_ends_it() -> None:
    gone, back = "nfs: server fs1 not responding, timed out", "nfs: server fs1 OK"
    _, memory = looked(CheckMemory(boot="b"), 0, log((-9, gone)))
    found, memory = looked(memory, 60, log((-9, gone), (30, back)))
    assert {severity for severity, _ in told(found)} == {"healthy"}
    found, _ = looked(memory, 120, log((-9, gone), (30, back)))
    assert told(found) == [("healthy", "")]


def test_stuck_processes_are_remembered_until_they_end() -> None:
    at = about(CheckMemory(), 0)
    found = judge_samples([], KNOWN, at)
    stuck = {"mount|/scratch": StuckProcess(1, 2, 3)}
    memory = memory_after(CheckMemory(), found, at, stuck)
    assert memory.stuck == stuck and memory_after(memory, found, at, {}).stuck == {}


def test_samples_of_a_check_that_is_not_known_are_not_passed_over() -> None:
    taken = TakenSample(check="another", device="d", t_ns=0, took_s=0.0, absent="")
    (found,) = judge_samples([taken], KNOWN, about()).findings
    assert found.severity == "unknown" and "of an unknown check" in found.detail
