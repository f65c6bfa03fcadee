"""An unmodified script on two nodes, which have host names of their own on this machine: beside
torchrun where it has an answer, and where it has none (a failure on one node alone)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.launch.torchrun.test_torchrun_equality import (
    EXTENDED,
    PROBE,
    TWO,
    Launched,
    Pair,
    assert_equal,
    free_port,
    pair,
)

__all__ = ["pair"]  # the fixture
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="host names need root"
    ),
]
FRAME = "-" * 72


class Nodes:
    """Two launchers of one run."""

    def __init__(self, pair: Pair, launcher: str = "outlast") -> None:
        self.pair, self.launcher = pair, launcher
        self.root = pair.tmp_path / launcher
        self.root.mkdir()
        self.port = str(free_port())
        self.running: list[subprocess.Popen[str]] = []
        self._args: tuple[str, ...] = ()
        self._act = ""

    def start(self, *args: str, act: str = "", backend: str = "static") -> None:
        self._args, self._act = args, act
        if backend != "static":  # torchrun takes the host's name else, which must resolve
            self._args = (f"--rdzv-backend={backend}", "--local-addr=127.0.0.1", *args)
        (self.pair.tmp_path / "token").write_text("0123456789abcdef")
        self.running = [self.launch(rank, f"node{rank}") for rank in range(2)]

    def launch(self, rank: int, host: str, *more: str) -> subprocess.Popen[str]:
        """Start a launcher by the command of the run, with some flags more."""
        name, folder = f"hostname {host} && exec ", self.pair.tmp_path
        flags = ["--nnodes=2", f"--node-rank={rank}", f"--rdzv-endpoint=localhost:{self.port}"]
        ours = ["run", f"--run-dir={folder / 'run'}", f"--token-file={folder / 'token'}"]
        python = [sys.executable, "-m", self.launcher]
        flags = [*(ours if self.launcher == "outlast" else []), *flags, *more]
        launcher = subprocess.Popen(
            ["unshare", "-u", "sh", "-c", f'{name}"$@"', "sh", *python, *flags, *self._args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=PROBE.parent,
            env={**os.environ, "PROBE": str(self.root), "ACT": self._act},
        )
        self.pair.running.append(launcher)
        return launcher

    def wait_for(self, *words: str) -> None:
        until_s = time.monotonic() + 60
        while not all((self.root / word).exists() for word in words):
            assert time.monotonic() < until_s, [one.poll() for one in self.running]
            threading.Event().wait(0.01)

    def end(self) -> list[Launched]:
        """Return the runs of both nodes, with the records of all ranks."""
        outputs = [one.communicate(timeout=120) for one in self.running]
        self.pair.running.clear()
        return [
            Launched(self.root, one.returncode, *output)
            for one, output in zip(self.running, outputs, strict=True)
        ]

    def run(self, *args: str, act: str = "", backend: str = "static") -> list[Launched]:
        self.start(*args, act=act, backend=backend)
        return self.end()

    def script(self, text: str) -> str:
        """Return the path of a script with some names."""
        path = self.pair.tmp_path / "script.py"
        path.write_text(
            "import os, signal, sys, time\nfrom pathlib import Path\n"
            "rank, attempt = int(os.environ['RANK']), int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
            "\nroot = Path(os.environ['PROBE'])\n"
            "def say(word): (root / word).write_text(str(os.getpid()))\n"
            "say(f'{attempt}-{rank}')\n"
            "while not all((root / f'{attempt}-{each}').exists() for each in range(4)):\n"
            f"    time.sleep(0.01)\n{text}\n"
        )
        return str(path)

    @property
    def words(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}


def is_dead(pid_file: Path) -> bool:
    """Whether a process has ended; nobody may wait for one that a test of launchers has adopted."""
    try:
        status = Path("/proc", pid_file.read_text(), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(") ")[2][0] in "ZX"


@EXTENDED
@pytest.mark.parametrize(
    ("backend", "act", "form"),
    [
        ("static", "", ()),
        ("c10d", "", ("-m", PROBE.stem)),
        ("static", "restart all", ()),
        ("static", "restart all", ("--no-python", sys.executable, "-u", PROBE.name)),
        ("static", "env://", ()),
    ],
)
def test_ranks_of_both_nodes_find_the_same(
    pair: Pair, backend: str, act: str, form: tuple[str, ...]
) -> None:
    flags = (*TWO, "--rdzv-id=77", "--max-restarts=2", *(form or (PROBE.name,)), "--lr=0.1")
    theirs, ours = (
        Nodes(pair, launcher).run(*flags, act=act, backend=backend)
        for launcher in ("torch.distributed.run", "outlast")
    )
    ports = {}
    for runs in (theirs, ours):
        for path in runs[0].root.glob("*.json"):  # a port is free for one of the two launchers
            port = json.loads(path.read_text())["environment"]["MASTER_PORT"]
            ports.setdefault(runs[0].root.name, set()).add(port)
    for their, our in zip(theirs, ours, strict=True):
        assert_equal(their, our)
    attempts = 3 if act == "restart all" else 1
    assert len(ours[0].records) == 4 * attempts
    assert len(ports["outlast"]) == 1, "all nodes know one store"


def test_a_failure_on_one_node_restarts_the_ranks_of_both(pair: Pair) -> None:
    nodes = Nodes(pair)
    text = "if attempt < 1 and rank == 3: sys.exit(5)\nwhile attempt < 1: signal.pause()"
    one, two = nodes.run(*TWO, "--max-restarts=2", nodes.script(text))
    assert (one.code, two.code) == (0, 0), one.err
    assert nodes.words == {f"{attempt}-{rank}" for attempt in (0, 1) for rank in range(4)}
    assert "restart 1 of 2: ended by itself with exit code 5 (rank 3)" in one.err


def test_a_last_failure_is_framed_once(pair: Pair) -> None:
    nodes = Nodes(pair)
    text = "if rank == 2: raise KeyError('moedl')\nsignal.pause()"
    one, two = nodes.run(*TWO, "--max-restarts=1", nodes.script(text))
    assert (one.code, two.code) == (1, 1)
    framed = one.err.split(FRAME)[1]
    assert all(word in framed for word in ("rank 2", "host node1", "KeyError: 'moedl'"))
    assert "decision: stop: no restart is left" in framed and FRAME not in two.err
    assert "the run has ended: rank 2 on node1 exited with code 1" in two.err
    assert nodes.words == {f"{attempt}-{rank}" for attempt in (0, 1) for rank in range(4)}


@EXTENDED
@pytest.mark.parametrize(
    ("text", "why", "attempts"),
    [
        ("if rank == 3: import nosuchmodule\nsignal.pause()", "3 restarts left unused", 1),
        (
            "if rank == 3: os.abort()\nsignal.pause()",
            "the same failure ended 3 attempts in a row",
            3,
        ),
    ],
)
def test_restarts_are_not_burnt(pair: Pair, text: str, why: str, attempts: int) -> None:
    nodes = Nodes(pair)
    one, two = nodes.run(*TWO, "--max-restarts=3", nodes.script(text))
    assert (one.code, two.code) == (1, 1) and why in one.err.split(FRAME)[1]
    assert len(nodes.words) == 4 * attempts


@EXTENDED
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_launcher_reaches_all_ranks(pair: Pair, node: int) -> None:
    nodes = Nodes(pair)
    nodes.start(*TWO, "--max-restarts=3", PROBE.name, act="wait")
    nodes.wait_for(*(f"0-{rank}-ready" for rank in range(4)))
    nodes.running[node].send_signal(signal.SIGINT)
    one, two = nodes.end()
    assert (one.code, two.code) == (4, 4), one.err
    assert {f"0-{rank}-SIGINT" for rank in range(4)} <= nodes.words
    assert f"SIGINT to the launcher of node{node}" in one.err.split(FRAME)[1]


@pytest.mark.parametrize("node", [1, pytest.param(0, marks=EXTENDED)])
def test_the_death_of_a_launcher_ends_all_ranks(pair: Pair, node: int) -> None:
    nodes = Nodes(pair)
    nodes.start(*TWO, f"--max-restarts={3 * (1 - node)}", nodes.script("signal.pause()"))
    nodes.wait_for(*(f"0-{rank}" for rank in range(4)))
    nodes.running[node].kill()
    runs = nodes.end()
    other = runs[1 - node]
    assert other.code == 3 and f"the launcher of node{node}" in other.err.split(FRAME)[1]
    until_s = time.monotonic() + 30  # the reaper ends the ranks of a killed launcher
    while not all(is_dead(nodes.root / f"0-{rank}") for rank in range(4)):
        assert time.monotonic() < until_s
        threading.Event().wait(0.01)
    assert re.search(r"no restart is left|decides for all nodes", other.err)


@EXTENDED
@pytest.mark.parametrize(
    ("backend", "number", "host"),
    [
        ("static", signal.SIGKILL, "node1"),
        ("c10d", signal.SIGKILL, "spare"),
        ("static", signal.SIGTERM, "node1"),
        ("static", signal.SIGKILL, "early"),
    ],
)
def test_a_lost_node_comes_back(
    pair: Pair, backend: str, number: signal.Signals, host: str
) -> None:
    nodes = Nodes(pair)
    script = nodes.script("if attempt == 0: signal.pause()")
    nodes.start(*TWO, "--max-restarts=1", script, backend=backend)
    nodes.wait_for(*(f"0-{rank}" for rank in range(4)))
    early = [nodes.launch(1, host)] if host == "early" else []  # all nodes are there
    while early and not (pair.tmp_path / "run/hosts/early/lock").exists():
        threading.Event().wait(0.01)
    nodes.running[1].send_signal(number)
    if host == "spare":  # launchers that do not fit are refused, and the run waits on
        refused = nodes.launch(1, "foreign", "--limit=stop_s=7")
        assert "foreign was refused by the run" in refused.communicate(timeout=120)[1]
        assert refused.returncode == 2
    (again,) = early or [nodes.launch(1, host)]
    codes = [each.wait(timeout=120) for each in (*nodes.running, again)]
    assert codes == [0, 4 if number == signal.SIGTERM else -9, 0]
    one, two, _ = (Launched(nodes.root, 0, *each.communicate()) for each in (*nodes.running, again))
    assert nodes.words == {f"{attempt}-{rank}" for attempt in (0, 1) for rank in range(4)}
    assert f"{host} takes part in the run" in one.err
    why = "the launcher of node1" if number == signal.SIGKILL else "SIGTERM to the launcher"
    assert f"restart 1 of 1: {why}" in one.err
    if number == signal.SIGTERM:
        assert "SIGTERM to the launcher of node1, which leaves the run; the other" in two.err


@EXTENDED
@pytest.mark.parametrize("busy", [-1, 3])
def test_a_standstill_of_both_nodes_is_restarted(pair: Pair, busy: int) -> None:
    nodes = Nodes(pair)
    flags = ("--limit=hang_floor_s=0.2", "--limit=hang_ceiling_s=3", "--limit=lease_s=2")
    text = f"""
until_s = time.monotonic() + 12
while attempt == 0 and rank == {busy} and time.monotonic() < until_s:
    pass
if attempt == 0 and {busy} < 0: signal.pause()
while attempt == 0 and not (root / "go").exists() and rank != {busy}: time.sleep(2)
say("go")
"""
    one, two = nodes.run(*TWO, *flags, "--max-restarts=1", nodes.script(text))
    assert (one.code, two.code) == (0, 0), one.err
    assert ("restart 1 of 1: no rank has computed" in one.err) == (busy < 0)


@EXTENDED
def test_a_store_that_is_killed_costs_a_restart(pair: Pair) -> None:
    nodes = Nodes(pair)
    nodes.start(*TWO, "--max-restarts=1", nodes.script("if attempt == 0: signal.pause()"))
    nodes.wait_for(*(f"0-{rank}" for rank in range(4)))
    children = Path(f"/proc/{nodes.running[0].pid}/task/{nodes.running[0].pid}/children")
    for pid in map(int, children.read_text().split()):
        if b"TCPStore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    one, two = nodes.end()
    assert (one.code, two.code) == (0, 0), one.err
    assert "restart 1 of 1: the process with the store of the ranks has ended" in one.err


@EXTENDED
def test_no_attempt_reads_the_store_of_another(pair: Pair) -> None:
    nodes = Nodes(pair)
    text = """
from torch.distributed import TCPStore
from datetime import timedelta
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
assert not store.check(["old"]) or attempt == 0
if attempt == 0:
    store.set("old", "1")
    store.add("there", 1)
    while store.add("there", 0) < 4: time.sleep(0.01)
    sys.exit(5)
store.add("there", 1)
while store.add("there", 0) < 4: time.sleep(0.01)
"""
    one, two = nodes.run(*TWO, "--max-restarts=1", nodes.script(text))
    assert (one.code, two.code) == (0, 0), one.err
