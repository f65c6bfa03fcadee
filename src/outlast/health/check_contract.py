"""Contract of a check: a probe that takes a sample, and a pure judge of it.

A check of one's own is a `Check` in a module of one's own, named in the settings
(`own = ["site_checks:CHECKS"]`); `outlast.testing.node_check_contract` has a
conformance suite for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from outlast.health.check_memory import CheckMemory, FlapRule, counter_rise, flap_after
from outlast.health.check_settings import CheckSettings
from outlast.log_records import Finding, Severity, Symptom
from outlast.node_logs.xid_policy import XidPolicy

SECOND_NS = 10**9


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe saw: plain values, so that it can be written down and judged elsewhere."""


S = TypeVar("S", bound=Sample)


class AbsentError(Exception):
    """Raised by a probe: this node does not have what is checked, and need not. The message says
    how that was seen."""


class CounterReading(NamedTuple):
    """A counter that only rises until it is reset. `flaps`: each rise is an event of a link."""

    key: str
    value: int
    flaps: bool = False


class Probe(NamedTuple, Generic[S]):
    """`take` runs in a child process: it may hang, and must not change anything. It raises
    AbsentError, or any other error, which makes the answer unknown."""

    device: str
    take: Callable[[], S]
    deadline_s: float = 5.0


class JudgeContext(NamedTuple):
    """What a judge knows besides the sample. `remembers`: there is a state directory; without one
    `memory` is empty, and of counters nothing can be said."""

    cluster: str
    node: str
    t_ns: int
    settings: CheckSettings
    memory: CheckMemory
    remembers: bool
    policy: XidPolicy | None = None  # of XIDs; None: the shipped one

    def since(self, count: CounterReading, window_s: float) -> int | None:
        """How far a counter rose in the last `window_s` seconds, as far as is known; None where
        it was not seen before."""
        return counter_rise(
            self.memory.counters.get(count.key, ()), count.value, self.t_ns, window_s
        )

    def flapping(self, count: CounterReading) -> bool:
        """A link went down often in a short time, and has not been quiet for long enough since."""
        rule = self.settings.flaps
        since = FlapRule(rule.times, rule.window_s, rule.recovery_s)
        return flap_after(self.memory, count.key, count.value, self.t_ns, since).flapping


class Observation(NamedTuple):
    """A finding without what is the same for all of a check."""

    severity: Severity
    detail: str
    device: str = ""
    code: str = ""
    symptom: Symptom | None = None  # None: the check's own


class Check(NamedTuple, Generic[S]):
    """`judge` is pure, and says at least one thing of every sample: where nothing is wrong, that
    it is healthy and what that was seen from. `probes` is quick and cannot hang. `lasting`:
    findings of events, which stay until nothing happened for the recovery time."""

    name: str
    symptom: Symptom
    sample: type[S]
    probes: Callable[[CheckSettings], Iterable[Probe[S]]]
    judge: Callable[[S, JudgeContext], Iterable[Observation | Finding]]
    counts: Callable[[S], Iterable[CounterReading]] = lambda _: ()
    lasting: bool = False

    def findings(self, sample: S, about: JudgeContext) -> Iterator[Finding]:
        for said in self.judge(sample, about):
            yield said if isinstance(said, Finding) else self.finding(said, about)

    def finding(self, said: Observation, about: JudgeContext) -> Finding:
        return Finding(
            t_ns=about.t_ns, cluster=about.cluster, node=about.node, check=self.name,
            symptom=said.symptom or self.symptom, severity=said.severity, code=said.code,
            device=said.device, detail=said.detail,
        )  # fmt: skip


AnyCheck = Check[Any]
