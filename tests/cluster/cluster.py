"""A run on several hosts, with one launcher on each."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.end_to_end.conftest import wait_for

from outlast.errors import RunDirError
from outlast.events import AnyEvent, GenerationOpened
from outlast.telemetry.committed_history import check_run
from outlast.telemetry.event_store import read_events
from outlast.telemetry.run_summary import RunSummary, summarise

JOB = Path(__file__).with_name("steady_job.py")
STEPS = 60
WITHIN_S = 120.0


class Cluster:
    """A run of a script on hosts, with one launcher on each; `disk` holds the run directory."""

    def __init__(self, folder: Path, hosts: Hosts, disk: Path | None = None) -> None:
        self.folder, self.hosts = folder, hosts
        self.disk = disk or folder
        self.run_dir = self.disk / "run"
        self.out = folder / "out"
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        self.gate = folder / "gate"  # the script of a worker waits while it is there
        self.environment: dict[str, dict[str, str]] = {}  # of the processes of a host
        self._words: dict[str, tuple[str, ...]] = {}  # command line of each host's launcher

    def start(
        self,
        nodes: str,
        ranks: int,
        *flags: str,
        job: tuple[str, ...] = (str(STEPS),),
        script: Path = JOB,
        **other: tuple[str, ...],
    ) -> None:
        """Start the launchers, on the hosts that have power; `job`: arguments of the script,
        `other`: flags of one host."""
        (self.folder / "token").write_text("a secret of these tests")
        common = ("--nnodes", nodes, "--nproc-per-node", str(ranks), "--run-dir", str(self.run_dir))
        for name in self.hosts.names:
            own = (*common, "--rdzv-endpoint=n1:29400", "--plain", *flags, *other.get(name, ()))
            run = (sys.executable, "-m", "outlast", "run", *own)
            self._words[name] = (*run, str(script), str(self.out), *job)
        for name in self.hosts.up:
            self.start_again(name)

    def resume(self, *names: str) -> None:
        """Start launchers by `outlast run --resume`, on all hosts or on these."""
        run = (sys.executable, "-m", "outlast", "run", "--resume", str(self.run_dir), "--plain")
        for name in names or self.hosts.up:
            self._words[name] = run
            self.start_again(name)

    def start_again(self, name: str, *flags: str) -> None:
        """Start the same command on a host, with some flags more."""
        if name in self.launchers:
            self.launchers[name].kill()
            self.launchers[name].communicate()
        at = self._words[name].index("--plain")
        values = self.environment.get(name, {})
        own = ("env", *(f"{key}={value}" for key, value in values.items())) if values else ()
        self.launchers[name] = subprocess.Popen(
            self.hosts.command(
                name, *own, *self._words[name][:at], *flags, *self._words[name][at:]
            ),
            env={**os.environ, "OUTLAST_TOKEN_FILE": str(self.folder / "token")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self) -> list[AnyEvent]:
        """Return the events that have been written so far."""
        with contextlib.suppress(RunDirError):  # nothing is written yet
            return read_events(self.run_dir)
        return []

    def wait_for_event(self, which: Callable[[AnyEvent], bool], what: str, count: int = 1) -> None:
        """Wait until `count` events of a kind are there."""

        def is_there() -> bool:
            ended = [one for one in self.launchers.values() if one.poll() is not None]
            found = sum(map(which, self.events())) >= count
            assert found or len(ended) < len(self.launchers), f"{what}: the run ended before"
            return found

        wait_for(is_there, what, WITHIN_S)

    def wait_for_steps(self, count: int = 1) -> None:
        """Wait until all ranks train, in the generation that is opened as number `count`."""
        self.wait_for_event(
            lambda one: isinstance(one, GenerationOpened), f"generation {count}", count
        )

    def generations(self) -> int:
        """Return how many generations have been opened."""
        return sum(isinstance(one, GenerationOpened) for one in self.events())

    def end(self, name: str) -> tuple[int, str]:
        """Return a launcher's exit code and output, without the frame of messages."""
        output, _ = self.launchers[name].communicate(timeout=WITHIN_S)
        return self.launchers[name].returncode, " ".join(output.replace("│", " ").split())

    def codes(self) -> dict[str, int]:
        """Return the exit codes of the launchers on all hosts with power, after their end."""
        return {name: self.end(name)[0] for name in self.hosts.up if name in self.launchers}

    def close(self) -> None:
        """Kill the launchers, and with all processes of their hosts those that have their pipes."""
        for name in self.hosts.up:
            self.hosts.crash(name)
        for launcher in self.launchers.values():
            launcher.kill()
            launcher.communicate()

    def results(self) -> list[str]:
        """Return the results of all ranks, of a run whose history its journal explains."""
        assert check_run(self.run_dir) == []
        return results(self.out)

    def summary(self) -> RunSummary:
        return summarise(self.run_dir)


def on_one_host(folder: Path, world: int, *job: str, script: Path = JOB) -> list[str]:
    """Return the results of an undisturbed run on one host."""
    flags = ("--plain", "--nproc-per-node", str(world), "--run-dir", str(folder / "run"))
    words = [sys.executable, "-m", "outlast", "run", *flags, str(script), str(folder / "out")]
    subprocess.run([*words, *job], check=True, capture_output=True, timeout=WITHIN_S)
    return results(folder / "out")


def results(out: Path) -> list[str]:
    """Return the results of all ranks in a directory."""
    return [path.read_text() for path in sorted(out.iterdir())]
