"""Contract of a check: a probe that takes a sample, and a pure judge of it.

A site adds checks as `Check` objects in a module that the settings name
(`own = ["site_checks:CHECKS"]`); `outlast.testing.node_check_contract` has a
conformance suite for them.
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
    """Base of a probe's sample: plain values, so that it can be recorded and judged elsewhere."""


S = TypeVar("S", bound=Sample)


class AbsentError(Exception):
    """Raised by a probe if the node does not have the checked device and need not have it.

    The message names the evidence.
    """


class CounterReading(NamedTuple):
    """Value of a counter that rises until it is reset.

    `flaps`: each rise is a link event.
    """

    key: str
    value: int
    flaps: bool = False


class Probe(NamedTuple, Generic[S]):
    """Probe of one device, run in a child process.

    `take` may hang and must not change anything. It raises AbsentError, or any other error, which
    makes the result unknown.
    """

    device: str
    take: Callable[[], S]
    deadline_s: float = 5.0


class JudgeContext(NamedTuple):
    """Input of a judge besides the sample.

    `remembers`: a state directory is in use; without one `memory` is empty and counters cannot be
    judged.
    """

    cluster: str
    node: str
    t_ns: int
    settings: CheckSettings
    memory: CheckMemory
    remembers: bool
    policy: XidPolicy | None = None  # of XIDs; None: the shipped one

    def since(self, count: CounterReading, window_s: float) -> int | None:
        """Return a counter's rise in the last `window_s` seconds; None without an earlier value.

        If the history is shorter than the window, the rise since its begin is returned.
        """
        return counter_rise(
            self.memory.counters.get(count.key, ()), count.value, self.t_ns, window_s
        )

    def flapping(self, count: CounterReading) -> bool:
        """Return whether a link flaps: it went down often in a short time and has not recovered
        since."""
        rule = self.settings.flaps
        since = FlapRule(rule.times, rule.window_s, rule.recovery_s)
        return flap_after(self.memory, count.key, count.value, self.t_ns, since).flapping


class Observation(NamedTuple):
    """Finding without the values that all findings of a check share."""

    severity: Severity
    detail: str
    device: str = ""
    code: str = ""
    symptom: Symptom | None = None  # None: the check's own


class Check(NamedTuple, Generic[S]):
    """A node check: its probes, and the pure judge of their samples.

    `judge` yields at least one observation per sample; a healthy one names its evidence. `probes`
    is quick and cannot hang. `lasting`: findings are events, which stay until nothing happened for
    the recovery time.
    """

    name: str
    symptom: Symptom
    sample: type[S]
    probes: Callable[[CheckSettings], Iterable[Probe[S]]]
    judge: Callable[[S, JudgeContext], Iterable[Observation | Finding]]
    counts: Callable[[S], Iterable[CounterReading]] = lambda _: ()
    lasting: bool = False

    def findings(self, sample: S, about: JudgeContext) -> Iterator[Finding]:
        """Yield the judge's observations of a sample as findings."""
        for observed in self.judge(sample, about):
            yield observed if isinstance(observed, Finding) else self.finding(observed, about)

    def finding(self, observation: Observation, about: JudgeContext) -> Finding:
        """Return an observation as a finding; the symptom defaults to the check's own."""
        return Finding(
            t_ns=about.t_ns, cluster=about.cluster, node=about.node, check=self.name,
            symptom=observation.symptom or self.symptom, severity=observation.severity,
            code=observation.code, device=observation.device, detail=observation.detail,
        )  # fmt: skip


AnyCheck = Check[Any]
