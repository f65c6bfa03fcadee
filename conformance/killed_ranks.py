"""Tests of gloo on "outlast", with a rank killed after a random collective of each.

python conformance/killed_ranks.py --tests FILE [--seed 1] [-k PATTERN] [--torch-source DIR]

Each test that passed in FILE is executed twice by its ranks. The first time counts its collectives.
The second time one rank ends by SIGKILL before its n-th collective, both chosen by the seed. The
others must leave the collective that they wait in. A new process takes the rank over, and all
repeat the test on groups of the next generation. The tests compare their results themselves.

    parent                     ranks
    forks the ranks      ->    connect generation 1, execute the test, vote
    a rank dies          ->    sever generation 1
    forks the rank anew  ->    connect generation 2, execute the test again, vote
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections import defaultdict
from collections.abc import Collection, Sequence
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import suites
from torch import distributed as dist

from outlast.transport import messages
from outlast.transport.rendezvous_messages import MeetingRelay
from outlast.worker.groups import GroupRegistry, register
from outlast.worker.groups.rendezvous import Mailbox

TEST_S = 180.0
PUBLISHED: Any = messages.Put | messages.Meet
ANSWERS: Any = messages.RendezvousValue | messages.Met
LEFT_OUT = {"test_barrier_timeout_full_group"}  # in a run the launcher alone has time limits
# Its tests make their groups themselves, which no launcher can replace the members of.
LEFT_OUT_FILE = suites.FAULT_TOLERANCE.removeprefix("test_c10d_")
SEVER_S = 5.0  # from a rank's death to the parent's word of it, at most


class Rank:
    """A rank's process: its groups, and its line to the parent."""

    def __init__(self, pipe: Connection, rank: int, kill_at: int) -> None:
        self.pipe, self.rank, self.kill_at = pipe, rank, kill_at
        self.count = 0
        self._lock = threading.Lock()
        self._severed: dict[int, threading.Event] = defaultdict(threading.Event)
        self._generations: queue.Queue[int] = queue.Queue()
        self.groups = GroupRegistry(
            mailbox=Mailbox(lambda body: self.send("put", msgspec.to_builtins(body))),
            on_trouble=lambda _: None,
            on_collective=self._started,
            timeout_s=TEST_S,
            copy_s=TEST_S,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message to the parent."""
        with self._lock:
            self.pipe.send_bytes(msgspec.msgpack.encode(message))

    def _listen(self) -> None:
        while True:
            match msgspec.msgpack.decode(self.pipe.recv_bytes()):
                case ["got", value]:
                    self.groups.deliver(msgspec.convert(value, ANSWERS))
                case ["connect", generation]:
                    self._generations.put(generation)
                case ["sever", generation]:
                    self.groups.sever(generation)
                    self._severed[generation].set()

    def _started(self, _: str) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(self) -> int:
        """Connect the next generation; return its number."""
        self.send("ready")
        generation = self._generations.get(timeout=TEST_S)
        self.groups.connect(generation, TEST_S)
        return generation

    def execute(self, tests: type[unittest.TestCase], name: str, named: str) -> None:
        """Execute a test until all ranks have passed it in one generation."""
        register(self.groups)
        world = rank_count(tests, name)
        self.groups.take_seat(self.rank, world, dry=False)
        generation = self.connect()
        store = self.groups.job_store()
        dist.init_process_group(named, store=store, rank=self.rank, world_size=world)
        while not self._passes(tests, name, generation):
            self.groups.reap()
            del self.groups._stable[1:]  # of the test's first execution: the second makes them anew
            if "torch.distributed.tensor" in sys.modules:  # DTensor remembers meshes of the first
                importlib.import_module(
                    "torch.distributed.tensor.debug"
                )._clear_sharding_prop_cache()
            self.count = 0
            generation = self.connect()
        self.send("passed", self.count)

    def _passes(self, tests: type[unittest.TestCase], name: str, generation: int) -> bool:
        from torch.testing._internal import common_utils

        test: Any = tests(name)
        test.rank = self.rank
        common_utils.set_rng_seed()
        try:
            getattr(test, name)()
            return self.groups.vote(f"{name} {generation}")
        except BaseException:
            # Collectives that ended early fail a test in many ways, and before the parent's word.
            if self._severed[generation].wait(SEVER_S):
                return False
            raise


def rank_count(tests: Any, name: str) -> int:
    """Return the number of ranks of a test."""
    return int(tests(name).world_size)


def run_rank(pipe: Connection, rank: int, kill_at: int, test: tuple[Any, str, str]) -> None:
    """Be a rank of one test."""
    line = Rank(pipe, rank, kill_at)
    try:
        line.execute(*test)
    except BaseException:  # noqa: BLE001 - the parent prints it
        line.send("failed", traceback.format_exc())
    threading.Event().wait(TEST_S)  # its end would cut the others off: the parent ends them all
    os._exit(0)


class Parent:
    """Starts the ranks of one test, relays their messages, and replaces one that dies."""

    def __init__(self, test: tuple[Any, str, str], kill: tuple[int, int] | None) -> None:
        """`test`: its class, its method, and the name of the backend that it asks for."""
        self._test, self._ranks = test, rank_count(*test[:2])
        self._generation = 1
        self._ready: set[int] = set()
        self._meetings = MeetingRelay()
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        self.counts: dict[int, int] = {}
        self.replaced = 0
        for rank in range(self._ranks):
            self._fork(rank, kill[1] if kill and kill[0] == rank else 0)

    def _fork(self, rank: int, kill_at: int) -> None:
        ours, theirs = get_context("fork").Pipe()
        process = get_context("fork").Process(
            target=run_rank, args=(theirs, rank, kill_at, self._test)
        )
        process.start()
        theirs.close()
        self._pipes[rank], self._processes[rank] = ours, process

    def result(self) -> str:
        """Return "" where all ranks have passed, else what failed."""
        deadline_s = time.monotonic() + TEST_S
        try:
            while len(self.counts) < self._ranks:
                left_s = deadline_s - time.monotonic()
                ready = connection.wait(self._pipes.values(), max(0.0, left_s))
                if not ready:
                    return f"no end within {TEST_S:.0f} s; passed on ranks {sorted(self.counts)}"
                for rank, pipe in list(self._pipes.items()):
                    if pipe in ready and (failure := self._hear(rank, pipe)):
                        return failure
            return ""
        finally:
            for process in self._processes.values():
                process.kill()
                process.join()

    def _hear(self, rank: int, pipe: Connection) -> str:
        try:
            message = msgspec.msgpack.decode(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._replace(rank)
        match message:
            case ["put", {"generation": generation} as value] if generation == self._generation:
                body = msgspec.convert(value, PUBLISHED)
                for other, answer in self._meetings.relay(rank, body):
                    self._send(["got", msgspec.to_builtins(answer)], (other,))
            case ["ready"]:
                self._ready.add(rank)
                if len(self._ready) == self._ranks:
                    self._ready.clear()
                    self._send(["connect", self._generation])
            case ["passed", count]:
                self.counts[rank] = count
            case ["failed", trace]:
                return f"rank {rank}: {trace}"
        return ""

    def _replace(self, rank: int) -> str:
        self._pipes.pop(rank).close()
        self._processes[rank].join()
        if self._processes[rank].exitcode != -signal.SIGKILL or self.replaced:
            return f"rank {rank} ended with exit code {self._processes[rank].exitcode}"
        self.replaced += 1
        self._send(["sever", self._generation])
        self._generation += 1
        self._ready.discard(rank)
        self._fork(rank, 0)
        return ""

    def _send(self, message: Sequence[Any], ranks: Collection[int] | None = None) -> None:
        for rank, pipe in self._pipes.items():
            if ranks is None or rank in ranks:
                pipe.send_bytes(msgspec.msgpack.encode(message))


def with_a_kill(test: tuple[Any, str, str], name: str, seed: int) -> dict[str, Any]:
    """Execute a test without and with a kill; return the outcome."""
    first = Parent(test, None)
    if failure := first.result():
        return {"test": name, "outcome": "failed undisturbed", "reason": failure}
    luck = random.Random(f"{seed} {name}")
    able = [rank for rank, count in sorted(first.counts.items()) if count]
    if not able:
        return {"test": name, "outcome": "no collective"}
    victim = luck.choice(able)
    at = luck.randint(1, first.counts[victim])
    second = Parent(test, (victim, at))
    failure = second.result()
    if not failure and not second.replaced:
        failure = "the rank was not killed"
    killed = f"rank {victim} before collective {at} of {first.counts[victim]}"
    outcome = "failed" if failure else "passed"
    return {"test": name, "outcome": outcome, "killed": killed, "reason": failure}


def execute_suite(suite: str, names: list[str], options: argparse.Namespace) -> int:
    """Execute the tests of a suite; return how many failed."""
    named = "gloo" if suite == "distributed" else "outlast"
    tests = suites.load(suite, "outlast", named, options.torch_source)
    failed = 0
    for name in names:
        chosen: Any = tests[name]
        chosen._barrier = lambda *_, **__: dist.barrier()  # torch's counts processes that are gone
        chosen._init_pg = lambda _: None  # the harness has made the group
        line = with_a_kill((chosen, name.rpartition(".")[2], named), name, options.seed)
        failed += line["outcome"].startswith("failed")
        print(json.dumps({"suite": suite, **line}), flush=True)
    return failed


def main() -> int:
    """Execute the tests that passed without kills; exit with 1 where one fails."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", type=Path, required=True, help="outcomes that compare.py wrote")
    parser.add_argument("--torch-source", type=Path, help="a checkout of PyTorch")
    parser.add_argument("-k", dest="pattern", default="")
    options = parser.parse_args()
    outcomes = json.loads(options.tests.read_text())
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        suites.prepare(folder, "gloo")
        for run, found in outcomes.items():
            suite, _, backend = run.partition(" ")
            if backend == "outlast":
                names = [
                    name
                    for name, each in found.items()
                    if each[0] == "passed" and re.search(options.pattern, name)
                ]
                failed += execute_suite(suite, [name for name in names if is_able(name)], options)
    return 1 if failed else 0


def is_able(name: str) -> bool:
    """Return whether a test can be executed with a kill."""
    return name not in LEFT_OUT and name.partition(".")[0] != LEFT_OUT_FILE


if __name__ == "__main__":
    sys.exit(main())
