"""Owners of terms that are stopped at random, overtaken, and woken."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.end_to_end.conftest import wait_for
from tests.launch.terms.term_racer import LEASE_S, length

from outlast.checkpoint.stores.folder_store import Folder
from outlast.launch.terms.term_records import TermLedger, TermRecord
from outlast.launch.terms.term_store import CheckpointStoreTerms

RACER = Path(__file__).with_name("term_racer.py")


@pytest.fixture
def racers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    started = {
        name: subprocess.Popen([sys.executable, str(RACER), str(tmp_path), name])
        for name in ("a", "b", "c")
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait(20)


@pytest.mark.process
@pytest.mark.parametrize(
    "races",
    [20, *(pytest.param(250, marks=pytest.mark.extended, id=f"250-{k}") for k in range(4))],
)
def test_nobody_acts_on_what_the_next_owner_has_not_read(
    races: int, tmp_path: Path, racers: dict[str, subprocess.Popen[bytes]]
) -> None:
    """An owner that was stopped, and wakes as the owner of an old term, has acted only on entries
    that the owner of the next term found."""
    ledger = TermLedger(CheckpointStoreTerms(Folder(tmp_path), "terms"), "race")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    moments = random.Random(seed)
    never = threading.Event()
    newest: list[TermRecord] = []

    def is_overtaken() -> bool:
        floor = newest[-1].term if newest else 0
        if (found := ledger.newest(floor)) is not None:
            newest.append(found)
        return found is not None

    wait_for(is_overtaken, "the first owner")
    for _ in range(races):
        never.wait(moments.uniform(0, LEASE_S))  # any moment of a term may be that of the stop
        stopped = racers[newest[-1].host]
        stopped.send_signal(signal.SIGSTOP)
        wait_for(is_overtaken, "another owner")
        stopped.send_signal(signal.SIGCONT)
    assert all(process.poll() is None for process in racers.values()), "two owners of a term"
    for process in racers.values():
        process.kill()
        process.wait(20)
    terms = range(1, newest[-1].term)
    assert len(terms) >= races
    for term in terms:
        acted = length(tmp_path / f"acts-{term}")
        taken = tmp_path / f"taken-{term + 1}"
        if length(taken):  # else its owner was killed before it began
            assert acted <= int(taken.read_text()), f"term {term}, seed {seed}"
    assert sum(length(tmp_path / f"acts-{term}") for term in terms) > races
