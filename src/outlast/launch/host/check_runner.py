"""Node checks during a run: `outlast check` as a process, its report as a message.

A check never ends, slows or blocks the run; its own failure is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast import config
from outlast.controller.inputs import AnyEntry, RankMigrated
from outlast.events import Warned
from outlast.launch.host import reaper
from outlast.launch.host.worker_pool import WorkerPool
from outlast.log_records import SEVERITIES, Finding
from outlast.node_logs.log_readings import device_address as device_of
from outlast.transport import messages

_SHIM = Path(__file__).with_name("shim.py")
ANSWER_BYTES_MAX = 8 << 20
KILL_S = 2.0  # SIGKILL to reaped; a check that survives prevents further checks
NICE = 10  # a higher value would starve the check on a fully loaded node
_PAUSE_S = 0.01


class CheckFailedError(Exception):
    """Failure of a check to produce a report; the message is the reason."""


class CheckProcess:
    """Runner of `command`, one process at a time; its stderr goes to a file in `folder`.

    `leaders`: pids that only this object may reap.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, deadline_s: float, leaders: set[int]
    ) -> None:
        self._command = command
        self._folder = folder
        self._deadline_s = deadline_s
        self._leaders = leaders
        self._kin: set[int] = set()
        self._popen: subprocess.Popen[bytes] | None = None

    async def look(self) -> bytes:
        """Return the check's output; kill it if cancelled. Raises CheckFailedError."""
        if self._popen is not None and not self._has_ended():
            raise CheckFailedError(
                f"the previous check (process {self._popen.pid}) cannot be killed"
            )
        try:
            popen = self._popen = self._start()
        except OSError as error:
            raise CheckFailedError(f"it cannot be started: {error}") from error
        assert popen.stdout is not None
        try:
            text = await self._read(popen.stdout.fileno())
            await self._ends_within(KILL_S)
        except TimeoutError:
            raise CheckFailedError(f"no answer within {self._deadline_s:g} s") from None
        finally:
            self._kill()
            popen.stdout.close()
            await self._ends_within(KILL_S)
        if not text:
            raise CheckFailedError(
                f"it printed nothing, exit code {popen.returncode}{self._last_error_line()}"
            )
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        # A check must not use state that others can write; with umask 002 the group could.
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self._folder / "stderr.log").open("wb") as errors:
            popen = subprocess.Popen(
                # The shim makes the check die with this process, like workers.
                [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._leaders.add(popen.pid)
        with contextlib.suppress(OSError):  # optional: lower priority than workers
            os.setpriority(os.PRIO_PROCESS, popen.pid, NICE)
        return popen

    async def _read(self, pipe: int) -> bytes:
        """Read all output; raises TimeoutError, and CheckFailedError above the size limit."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        data = bytearray()

        def more() -> None:
            with contextlib.suppress(BlockingIOError):
                chunk = os.read(pipe, 1 << 16)
                data.extend(chunk)
                if (not chunk or len(data) > ANSWER_BYTES_MAX) and not ended.done():
                    ended.set_result(None)

        os.set_blocking(pipe, False)
        loop.add_reader(pipe, more)
        try:
            await asyncio.wait_for(ended, self._deadline_s)
        finally:
            loop.remove_reader(pipe)
        if len(data) > ANSWER_BYTES_MAX:
            raise CheckFailedError(f"it answered more than {ANSWER_BYTES_MAX:,} bytes")
        return bytes(data)

    def _kill(self) -> None:
        """Kill the check and all its descendants, including those in other sessions."""
        popen = self._popen
        if popen is None or self._has_ended():
            return
        processes = reaper.all_processes()
        below = reaper.descendants({popen.pid}, processes)
        family = [processes[pid] for pid in below if pid in processes]
        self._kin |= {process.pid for process in family} - {popen.pid}
        popen.send_signal(signal.SIGKILL)
        for process in family:
            reaper.kill(process)

    async def _ends_within(self, seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while not self._has_ended():
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(_PAUSE_S)
        return True

    def _has_ended(self) -> bool:
        """Return whether all processes have ended; reap orphans, as this is a subreaper."""
        popen = self._popen
        if popen is None:
            return True
        if popen.poll() is None:
            return False
        self._leaders.discard(popen.pid)
        for pid in tuple(self._kin):
            try:
                is_reaped = os.waitpid(pid, os.WNOHANG)[0] == pid
            except ChildProcessError:
                is_reaped = True
            if is_reaped:
                self._kin.discard(pid)
        return not self._kin

    def _last_error_line(self) -> str:
        try:
            lines = (self._folder / "stderr.log").read_bytes()[-4096:].decode(errors="replace")
        except OSError:
            return ""
        words = lines.strip().splitlines()
        return f": {words[-1]}" if words else ""


OWN = "outlast check"
DEADLINE_S = 60.0  # sampling takes at most 30 s
FOUND_MAX = 256
DETAIL_MAX = 500  # characters
PAUSE_PART = 10  # the pause is at least 1/10 of the interval, even after a long check
GPUS = Path("/proc/driver/nvidia/gpus")
_INDEX = re.compile(r"gpu[ :#]?\s*([0-9]{1,4})", re.IGNORECASE)


class CheckOutput(msgspec.Struct, frozen=True):
    """Fields used from the output of `outlast check --json`."""

    version: int
    findings: tuple[Finding, ...]


class CheckedFindings(NamedTuple):
    """Result of one run of the checks. `complete_checks`: checks that were complete."""

    found: tuple[Warned, ...]
    complete_checks: tuple[str, ...]


class CheckRunner:
    """Periodic checks, every `plan.check_every_s` seconds; each run reports all findings."""

    def __init__(
        self,
        crew: WorkerPool,
        say: Callable[[messages.NodeChecked], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._crew = crew
        self._say = say
        self._every_s = crew.plan.check_every_s
        self._newest: CheckedFindings | None = None
        state = crew.run_dir.path.absolute() / "health"
        if crew.plan.node.total > 1:
            state /= crew.host  # the state directory belongs to one node
        self._process = CheckProcess(
            command(crew.plan.check_settings, state), state, deadline_s, crew.leaders
        )

    async def run(self) -> None:
        """Run and report checks periodically, until cancelled."""
        while True:
            began_s = time.monotonic()
            try:
                self._newest = read(await self._process.look())
            except CheckFailedError as error:
                self._newest = failed(self._newest, str(error))
            self.report_findings()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(self._every_s - took_s, self._every_s / PAUSE_PART))

    def report_findings(self) -> None:
        """Report the last findings again, with the current workers of the devices."""
        if self._newest is None:
            return
        listed, visible = _listed(), config.visible_devices()
        by_rank = {worker.local_rank: worker.name for worker in self._crew.workers.values()}
        found, unwell = [], set[int]()
        for one in self._newest.found:
            rank = local_rank(one.device, listed, visible)
            if rank is not None and one.severity in ("now", "drain"):
                unwell.add(rank)
            worker = by_rank.get(rank, "") if rank is not None else ""
            found.append(msgspec.structs.replace(one, worker=worker))
        if self._crew.plan.migrate_on:
            self._crew.unwell = unwell
        self._say(messages.NodeChecked(found=tuple(found), completed=self._newest.complete_checks))


def remaining_findings(journal: Iterable[AnyEntry], host: str) -> set[int]:
    """Return the local ranks from whose device an earlier launcher migrated a worker.

    They are avoided until this launcher's first check.
    """
    listed, visible = _listed(), config.visible_devices()
    found = [one.finding for one in journal if isinstance(one, RankMigrated)]
    ranks = {local_rank(one.device, listed, visible) for one in found if one.host == host}
    return {rank for rank in ranks if rank is not None}


def command(settings: str, state: Path) -> list[str]:
    """Return the command line of the check."""
    base = [sys.executable, "-m", "outlast", "check", "--profile", "periodic", "--json"]
    base += ["--state", str(state)]
    return [*base, "--settings", settings] if settings else base


def read(text: bytes) -> CheckedFindings:
    """Parse a report; raises CheckFailedError if it is malformed or empty."""
    try:
        report = msgspec.json.decode(text, type=CheckOutput)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckFailedError(f"its output is no report ({error})") from error
    if not report.findings:
        raise CheckFailedError("its report has no finding: nothing was checked")
    found = sorted(
        (one for one in report.findings if one.severity != "healthy"),
        key=lambda one: SEVERITIES.index(one.severity),
    )
    unknown = {one.check for one in found if one.severity == "unknown"}
    complete_checks = {one.check for one in report.findings} - unknown
    # A finding cut off by FOUND_MAX is not resolved.
    complete_checks -= {one.check for one in found[FOUND_MAX:]}
    return CheckedFindings(
        tuple(_warned(one) for one in found[:FOUND_MAX]), (*sorted(complete_checks), OWN)
    )


def failed(before: CheckedFindings | None, why: str) -> CheckedFindings:
    """Return the earlier findings, preceded by one of unknown severity for the failed check."""
    own = Warned(
        t_ns=0,
        host="",
        check=OWN,
        symptom="other",
        severity="unknown",
        code="",
        device="",
        detail=why[:DETAIL_MAX],
    )
    kept = tuple(one for one in before.found if one.check != OWN) if before else ()
    return CheckedFindings((own, *kept), ())


def _warned(one: Finding) -> Warned:
    return Warned(
        t_ns=one.t_ns,
        host=one.node,
        check=one.check[:80],
        symptom=one.symptom,
        severity=one.severity,
        code=one.code[:80],
        device=one.device[:200],
        detail=one.detail[:DETAIL_MAX],
    )


def _listed() -> list[str]:
    """Return the PCI addresses of this host's GPUs, in order."""
    try:
        return sorted(device_of(each.name) for each in GPUS.iterdir())
    except OSError:
        return []


def local_rank(device: str, listed: Sequence[str], visible: Iterable[str] | None) -> int | None:
    """Return the local rank that has this GPU, or None if that is unknown. `listed`: PCI addresses
    of the host's GPUs, in order; `visible`: the GPUs that workers see, None for all."""
    index = _INDEX.fullmatch(device.strip())
    if index:
        number = int(index[1])
    elif device_of(device) in listed:
        number = listed.index(device_of(device))
    else:
        return None
    if visible is None:
        return number
    visible_gpus = list(visible)
    if not all(each.isdecimal() for each in visible_gpus):
        return None
    return visible_gpus.index(str(number)) if str(number) in visible_gpus else None
