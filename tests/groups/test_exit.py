"""However the script ends, the interpreter leaves with its own exit code, soon."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process
CASES = {"end": 0, "raise": 1, "exit": 3, "destroy": 0, "pending": 0, "pending_recv": 0,
         "severed": 0, "any_source": 0}  # fmt: skip


@pytest.mark.parametrize("how", CASES)
def test_exit_code(cluster: Any, how: str) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    script = str(Path(__file__).parent / "exits.py")
    children = [
        subprocess.Popen(
            [sys.executable, script, how, str(theirs.fileno()), str(rank), "2"],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (_, theirs) in enumerate(pairs)
    ]
    cluster.lines = [type(cluster).line(ours) for ours, _ in pairs]
    for _, theirs in pairs:
        theirs.close()
    for rank in range(2):
        threading.Thread(target=cluster._relay, args=(rank,), daemon=True).start()
    for child in children:
        try:
            _, said = child.communicate(timeout=60)
        finally:
            child.kill()
        assert child.returncode == CASES[how], said
        assert "terminate called" not in said
