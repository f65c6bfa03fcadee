"""Launcher killed at every step of its upkeep: copies, deletions and cleanup."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.keeper_orders import TIMEOUT_S, Desk, newest
from tests.checkpoint.syscall_gate import CHANGES, KILL, PASS, Gate, Seen
from tests.checkpoint.upkeep.launcher_upkeep import work

from outlast.checkpoint.stores.catalog import checkpoint_places
from outlast.checkpoint.stores.folder_store import Folder

pytestmark = pytest.mark.process
# One process that has imported everything, and forks one for each kill: that goes behind a gate,
# hands the other end to the test, and does a launcher's work once it is told to.
FORKER = """
import os, socket, sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.checkpoint.syscall_gate import CHANGES, enter
from tests.checkpoint.upkeep.launcher_upkeep import work

test = socket.socket(fileno=int(sys.argv[2]))
while room := test.recv(4096).decode():
    child = os.fork()
    if not child:
        try:
            listener = enter(CHANGES)
        except OSError as error:
            test.send(str(error).encode())
            os._exit(0)
        socket.send_fds(test, [b"ready"], [listener])
        os.close(listener)
        test.recv(1)
        work(Path(room))
        os._exit(0)
    test.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
"""


@pytest.fixture(scope="module")
def forker() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", FORKER, str(Path(__file__).parents[3]), str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        theirs.close()
        ours.settimeout(TIMEOUT_S)
        yield ours
        ours.close()


def killed_at(nth: int, room: Path, forker: socket.socket) -> str:
    """What the launcher's work was about to do when it was killed; "" when it came to its end."""
    steps: list[str] = []

    def act(seen: Seen) -> str:
        if not seen.path.startswith(str(room)) or (seen.step == "open" and not seen.writes):
            return PASS
        steps.append(f"{seen.step} {seen.path}")
        return KILL if len(steps) == nth else PASS

    forker.send(str(room).encode())
    word, listener, _, _ = socket.recv_fds(forker, 4096, 1)
    if not listener:
        pytest.skip(word.decode())
    gate = Gate(act)
    gate.watch(listener[0])
    forker.send(b".")
    ended = forker.recv(4096).decode()
    gate.close()
    assert ended in ("0", str(-signal.SIGKILL)), ended
    return steps[-1] if ended != "0" else ""


def shown(names: set[str]) -> list[str]:
    """All but drafts of single records, which have names of their own."""
    return sorted(name for name in names if not name.startswith("."))


@pytest.mark.extended
def test_at_every_step(tmp_path: Path, forker: socket.socket) -> None:
    """The newest one can be read at any moment, here or where it was copied to; the next launcher
    brings all to its end, and leaves nothing lying about."""
    desk = Desk(tmp_path / "made")
    keeper = desk.keeper()
    for step in (1, 2):
        assert desk.save(keeper, step).kind == "committed"
    desk.close()
    nth, struck = 0, set[str]()
    while True:
        nth += 1
        room = tmp_path / str(nth)
        room.mkdir()
        shutil.copytree(desk.root, room / "local")
        half = room / "local" / "step-000000003-n3-a3"
        half.mkdir()
        (half / "shard-00000.part").write_bytes(b"half")
        step = killed_at(nth, room, forker)
        assert newest(room / "local") == 2
        assert newest(room / "durable") in (None, 2)
        if not step:
            break
        struck.add(step.split()[0])
        work(room)
        assert [place.step for place in checkpoint_places(Folder(room / "local"))] == [2]
        assert newest(room / "durable") == 2
        for root in (room / "local", room / "durable"):
            left = {path.name for path in root.iterdir()} - {"latest"}
            assert shown(left) == ["step-000000002-n2-a2"], (step, left)
        left = {path.name for path in (room / "durable" / "step-000000002-n2-a2").iterdir()}
        assert shown(left) == ["commit.json", "rank-00000.json", "shard-00000"], (step, left)
    assert nth > 20 and struck == set(CHANGES) - {"allocate"}, (nth, struck)
