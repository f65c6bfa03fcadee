"""Judgement of a sample by a check, with settings and memory."""

from __future__ import annotations

from typing import Any

from outlast.health.check_contract import AnyCheck, JudgeContext, Sample
from outlast.health.check_memory import CheckMemory, FlapRule, updated_memory
from outlast.health.check_settings import parse_settings
from outlast.log_records import Finding

T0_NS = 1_763_000_000 * 10**9
SECOND_NS = 10**9


def about(before: CheckMemory | None = None, /, t_s: float = 0.0, **settings: Any) -> JudgeContext:
    """Return the context of a judgement. `t_s`: seconds after T0. `settings`: as in the file."""
    return JudgeContext(
        cluster="c", node="n1", t_ns=T0_NS + round(t_s * SECOND_NS),
        settings=parse_settings(settings, "test"), memory=before or CheckMemory(),
        remembers=before is not None,
    )  # fmt: skip


def said(check: AnyCheck, sample: Sample, at: JudgeContext) -> list[tuple[str, str, str]]:
    """Return (severity, device, detail) of each finding."""
    return [(one.severity, one.device, one.detail) for one in found(check, sample, at)]


def found(check: AnyCheck, sample: Sample, at: JudgeContext) -> list[Finding]:
    return list(check.findings(sample, at))


def severities(check: AnyCheck, sample: Sample, at: JudgeContext) -> list[str]:
    return [one.severity for one in found(check, sample, at)]


def after(check: AnyCheck, sample: Sample, at: JudgeContext, boot: str = "") -> CheckMemory:
    """Return the memory after the sample was judged."""
    rule = at.settings.flaps
    events = [one for one in found(check, sample, at) if check.lasting]
    return updated_memory(
        at.memory, boot=boot, events=events, now_ns=at.t_ns,
        counts={one.key: (one.value, one.flaps) for one in check.counts(sample)},
        rule=FlapRule(rule.times, rule.window_s, rule.recovery_s),
    )  # fmt: skip
