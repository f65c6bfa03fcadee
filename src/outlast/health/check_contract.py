"""Contract of a check: a probe that takes a sample, a pure judge of it, and tools for probes.

A site adds checks as `Check` objects in a module that the settings name
(`own = ["site_checks:CHECKS"]`); `outlast.testing.extension_contracts` has a
conformance suite for them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from outlast.config import child_environment
from outlast.health.check_memory import CheckMemory, FlapRule, counter_rise, flap_after
from outlast.health.check_settings import CheckSettings
from outlast.log_records import Finding, Severity, Symptom
from outlast.node_logs.nvidia_errors import XidPolicy

SECOND_NS = 10**9


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a probe's sample: plain values, so that it can be recorded and judged elsewhere."""


S = TypeVar("S", bound=Sample)


class AbsentError(Exception):
    """Raised by a probe if the node does not have the checked device and need not have it.

    The message names the evidence.
    """


class CounterReading(NamedTuple):
    """Value of a counter that rises until it is reset. `flaps`: each rise is a link event."""

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
            t_ns=about.t_ns,
            cluster=about.cluster,
            node=about.node,
            check=self.name,
            symptom=observation.symptom or self.symptom,
            severity=observation.severity,
            code=observation.code,
            device=observation.device,
            detail=observation.detail,
        )


AnyCheck = Check[Any]


TOOL_S = 20.0  # the probe's own deadline is usually shorter
TEXT_MAX = 16 << 20


class ToolError(Exception):
    """A tool failed; the message is its error output."""


def read_text(path: Path) -> str | None:
    """Return a small file of /proc or /sys; None if it is missing or unreadable."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    """Return the first number of such a file; None if there is none."""
    words = (read_text(path) or "").split()
    try:
        return int(words[0], 0) if words else None
    except ValueError:
        return None


def list_names(path: Path) -> list[str]:
    """Return the sorted names in a directory; none if it does not exist."""
    try:
        return sorted(each.name for each in path.iterdir())
    except OSError:
        return []


def run_tool(
    command: list[str], *, codes: tuple[int, ...] | None = (0,), within_s: float = TOOL_S
) -> str:
    """Run a tool and return its standard output.

    `codes`: exit codes that are no failure; None: all. Raises AbsentError if it is not installed,
    ToolError if it failed.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=within_s,
            check=False,
            env=child_environment({"LC_ALL": "C", "TZ": "UTC"}),
        )
    except FileNotFoundError as error:
        raise AbsentError(f"{command[0]} is not installed") from error
    if codes is not None and done.returncode not in codes:
        why = (done.stderr or done.stdout).decode("utf-8", "replace").strip()
        raise ToolError(f"{command[0]} ended with {done.returncode}: {why[:300] or 'no message'}")
    return done.stdout[:TEXT_MAX].decode("utf-8", "replace")
