"""Exit codes of interpreters with stable groups, for every way to end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked_scripts import Left, rear

pytestmark = pytest.mark.process
EXITS = str(Path(__file__).with_name("exiting_rank.py"))
CASES = {"end": 0, "raise": 1, "exit": 3, "destroy": 0, "pending": 0, "pending_recv": 0,
         "severed": 0, "any_source": 0}  # fmt: skip


@pytest.fixture(scope="module")
def left(
    clusters: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Left]]:
    """What the two ranks of each case left."""
    batches, lent = [], []
    for how in CASES:
        cluster = clusters()
        pairs = [socket.socketpair() for _ in range(2)]
        cluster.lines = [type(cluster).line(ours) for ours, _ in pairs]
        lent += [theirs for _, theirs in pairs]
        batches.append(
            [[EXITS, how, str(pair[1].fileno()), str(rank), "2"] for rank, pair in enumerate(pairs)]
        )
        for rank in range(2):
            threading.Thread(target=cluster._relay, args=(rank,), daemon=True).start()
    left = rear(tmp_path_factory.mktemp("exits"), batches, fds=[one.fileno() for one in lent])
    for theirs in lent:
        theirs.close()
    return dict(zip(CASES, left, strict=True))


@pytest.mark.parametrize("how", CASES)
def test_exit_code(left: dict[str, list[Left]], how: str) -> None:
    for rank in left[how]:
        assert rank.code == CASES[how], rank.err
        assert "terminate called" not in rank.err
