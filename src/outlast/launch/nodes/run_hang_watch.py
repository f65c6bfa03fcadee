"""Hang detection in a run of several nodes, from what agents report of ranks without progress.

```
agents, each   RanksObserved while a rank of the host makes no progress, every 1/4 of the floor
controller     once all hosts with ranks have reported: hang_detection.watch
               HangFound to these hosts: all collect flight recorder dumps in one folder
one agent      Suspect, unless the rank has made progress meanwhile
```

A host that does not report makes progress, and others may wait for it. Clocks of hosts are not
compared: a report's times are moved by the difference between its arrival and its own `now_ns`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from outlast.config import Limits
from outlast.controller import hang_detection
from outlast.controller.controller_state import ControllerState
from outlast.events import Fault
from outlast.launch.host.hang_evidence import folder_name
from outlast.transport import messages
from outlast.transport.worker_page import WorkerObservation

_FRESH_PERIODS = 2  # a host whose newest report is older makes progress, or is away
_JUMP_NS = 1_000_000_000  # a clock that moved by more was stopped, or its host restarted


class HostReport(NamedTuple):
    """Newest report of a host: arrival, and its ranks with times of the controller's clock."""

    arrived_ns: int
    ranks: tuple[WorkerObservation, ...]


class RunHangWatch:
    """Hang detector of the controller's node. `state`: the controller's; `send`: to an agent;
    `unix_ns`: the Unix time."""

    def __init__(
        self,
        limits: Limits,
        state: Callable[[], ControllerState],
        send: Callable[[str, messages.HangFound], None],
        unix_ns: Callable[[], int],
    ) -> None:
        self._limits, self._state, self._send, self._unix_ns = limits, state, send, unix_ns
        self._period_ns = int(1e9 * limits.hang_report_s)
        self._ahead_ns: dict[str, int] = {}  # of this clock before that of a host
        self._reports: dict[str, HostReport] = {}
        self._memory = hang_detection.WorkerHistory()
        self._judged_ns = 0

    def observed(self, agent: str, body: messages.RanksObserved, now_ns: int | None = None) -> None:
        """Take a report, and judge all ranks if it completes the picture. `now_ns`:
        CLOCK_MONOTONIC of this host; None: now."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        if not body.ranks:
            self._reports.pop(agent, None)
            return
        ahead_ns = now_ns - body.now_ns
        if abs(ahead_ns - self._ahead_ns.get(agent, ahead_ns + 2 * _JUMP_NS)) > _JUMP_NS:
            self._ahead_ns[agent] = ahead_ns
        ranks = tuple(_moved(look, self._ahead_ns[agent]) for look in body.ranks)
        self._reports[agent] = HostReport(now_ns, ranks)
        if now_ns - self._judged_ns >= self._period_ns and self._state().mode == "open":
            self._judge(now_ns)

    def _judge(self, now_ns: int) -> None:
        workers = self._state().members.workers
        agents = sorted({one.agent for one in workers.values() if one.seat >= 0})
        reports = [self._reports.get(agent) for agent in agents]
        looks: list[WorkerObservation] = []
        for report in reports:
            if report is None or now_ns - report.arrived_ns > _FRESH_PERIODS * self._period_ns:
                return
            looks += [one for one in report.ranks if one.worker in workers]
        self._judged_ns = now_ns
        self._memory, verdict = hang_detection.watch(
            self._memory,
            looks,
            now_ns,
            self._limits,
            unix_ns=self._unix_ns(),
            parts="progress",
        )
        for fault in verdict.suspects:
            moved_ns = next(one.t_ns for one in looks if one.worker == fault.worker)
            self._announce(fault, agents, workers[fault.worker].agent, moved_ns)
        if verdict.retry:
            self._announce(verdict.retry, agents, agents[0], 0)

    def _announce(self, fault: Fault, agents: list[str], reporter: str, moved_ns: int) -> None:
        folder = folder_name(self._unix_ns())
        for agent in agents:
            found = messages.HangFound(
                worker=fault.worker,
                fault=fault,
                folder=folder,
                reports=agent == reporter,
                moved_ns=moved_ns - self._ahead_ns[agent],
            )
            self._send(agent, found)


def _moved(look: WorkerObservation, by_ns: int) -> WorkerObservation:
    return replace(
        look,
        t_ns=look.t_ns + by_ns,
        t_work_ns=look.t_work_ns + by_ns if look.t_work_ns else 0,
        t_woken_ns=look.t_woken_ns + by_ns if look.t_woken_ns else 0,
    )
