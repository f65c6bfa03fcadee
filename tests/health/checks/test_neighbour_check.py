"""Neighbour check: slow nodes and slow links, on constructed fleets and real all-reduces."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.health.judged_samples import about, said, severities

from outlast.health.checks.neighbour_check import (
    CHECK,
    Pair,
    PairSpeeds,
    PairsSample,
    judge_pairs,
    search_slow,
)
from outlast.health.node_report import NodeReport

FAST, SLOW = 40e9, 4e9
# The other nodes, which need to import torch only once.
OTHERS = """
import os, sys
from pathlib import Path
import msgspec, torch.distributed
from outlast.health.checks.neighbour_check import measure
from outlast.health.check_settings import RingSettings as Ring
place, address = sys.argv[1:]
pids = []
for rank in (1, 2):
    pids.append(os.fork())
    if pids[-1] == 0:
        ring = Ring(address=address, rank=rank, world=3, mbytes=1, gbytes_min=1e-9)
        Path(place, f"{rank}.json").write_bytes(msgspec.json.encode(measure(ring)))
        os._exit(0)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
"""


def measured(
    world: int, nodes: set[int], links: set[Pair], least: float | None = None
) -> tuple[PairSpeeds, int]:
    """What a search finds out about a fleet, and in how many rounds. Pairs of a round are
    disjoint."""
    steps, rounds = search_slow(world, least), 0
    answers: Mapping[Pair, float] | None = None
    while True:
        try:
            asked = next(steps) if answers is None else steps.send(answers)
        except StopIteration as end:
            return end.value, rounds
        rounds += 1
        flat = [node for pair in asked for node in pair]
        assert len(flat) == len(set(flat)) and all(a < b < world for a, b in asked)
        answers = {pair: SLOW if set(pair) & nodes or pair in links else FAST for pair in asked}


@given(st.integers(4, 40), st.data())
@settings(max_examples=60)
def test_a_single_slow_node_is_found(world: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, world - 1))
    found, rounds = measured(world, {node}, set())
    told = judge_pairs(world, found, None)
    assert told.nodes == {node} and told.links == set() and not told.unclear
    assert rounds <= 6


@given(st.integers(4, 40), st.data())
@settings(max_examples=60)
def test_one_slow_link_between_neighbours_is_found(world: int, data: st.DataObject) -> None:
    a = data.draw(st.integers(0, world - 1))
    link = (min(a, (a + 1) % world), max(a, (a + 1) % world))
    found, _ = measured(world, set(), {link})
    told = judge_pairs(world, found, None)
    assert told.links == {link} and told.nodes == set()


@given(st.integers(8, 40), st.data())
@settings(max_examples=60)
def test_several_slow_nodes_are_found_and_no_fast_one(world: int, data: st.DataObject) -> None:
    """As long as more than half are fast, and what is expected is known."""
    nodes = data.draw(st.sets(st.integers(0, world - 1), max_size=world // 4))
    found, _ = measured(world, nodes, set(), least=20e9)
    told = judge_pairs(world, found, 20e9)
    assert told.nodes == nodes and told.links == set()


def test_a_good_node_between_two_slow_ones_is_cleared() -> None:
    found, _ = measured(8, {2, 4}, set())
    assert judge_pairs(8, found, None).nodes == {2, 4}


def test_without_a_fast_node_the_result_is_unclear() -> None:
    found, _ = measured(6, set(range(6)), set(), least=20e9)
    assert judge_pairs(6, found, 20e9).unclear
    none = dict.fromkeys(found, 0.0)
    assert judge_pairs(6, none, None).unclear, "not one answer"


def test_each_node_judges_itself() -> None:
    found, _ = measured(6, {4}, {(0, 1)})
    names = tuple(f"n{k}" for k in range(6))
    pairs = tuple((a, b, speed) for (a, b), speed in found.items())

    def of(rank: int) -> list[tuple[str, str, str]]:
        return said(CHECK, PairsSample(rank=rank, names=names, pairs=pairs), about())

    assert [of(rank)[0][0] for rank in range(6)] == [
        "warn", "warn", "healthy", "healthy", "drain", "healthy",
    ]  # fmt: skip
    assert of(0) == [("warn", "n1", "4 GB/s to n1; both are fast with other nodes")]
    demanding = about(ring={"gbytes_min": 100})
    assert severities(CHECK, PairsSample(rank=2, names=names, pairs=pairs), demanding) == [
        "unknown"
    ]


@pytest.mark.process
def test_three_nodes_meet_for_real(tmp_path: Path) -> None:
    """Three processes as three nodes, over gloo on this machine, one of them with the command."""
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "check.toml"
    path.write_text("[ring]\nmbytes = 1\ngbytes_min = 1e-9\n")
    address = f"127.0.0.1:{port}"
    words = ["check", "--json", "--only", "neighbour", "--profile", "preflight", "--settings",
             str(path), "--ring", address, "--world", "3", "--rank", "0"]  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", OTHERS, str(tmp_path), address]) as others:
        done = subprocess.run(
            [sys.executable, "-m", "outlast", *words], stdout=subprocess.PIPE, timeout=240
        )
        assert others.wait(timeout=60) == 0
    assert done.returncode == 0, done.stdout.decode()
    report = msgspec.json.decode(done.stdout, type=NodeReport)
    assert report.severity == "healthy" and "with 2 other nodes" in report.findings[0].detail
    for rank in (1, 2):
        sample = msgspec.json.decode((tmp_path / f"{rank}.json").read_bytes(), type=PairsSample)
        assert severities(CHECK, sample, about(ring={"gbytes_min": 1e-9})) == ["healthy"]
