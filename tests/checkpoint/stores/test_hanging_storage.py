"""Hanging file systems, as a hard NFS mount: every wait has a deadline."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.keeper_orders import Desk, newest, order_of, until
from tests.checkpoint.syscall_gate import CHANGES, HOLD, PASS, Act, Gate, Seen, gate

from outlast.checkpoint.checkpointer import Checkpointer
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint, verify
from outlast.checkpoint.stores.chunk_reader import IoThread
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import StorageError

pytestmark = pytest.mark.process
READING = ("open", "read", "list", "stat")
ANSWER_S = 0.4
TIMEOUT_S = 60.0


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((300_000,), value)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("hanging") / "root"
    with Checkpointer(root) as saves:
        for step in (1, 2):
            saves.save(step, state(float(step)))
    return root


@pytest.fixture
def behind() -> Iterator[Gate]:
    with gate() as one:
        yield one


def error_of(behind: Gate, do: Callable[[], object], steps: tuple[str, ...] = READING) -> str:
    """The StorageError that `do` raises behind the gate."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001 - told to the test's own thread
            errors.append(error)

    thread = behind.run(work, steps)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "it waits for ever"
    assert errors and isinstance(errors[0], StorageError), errors
    return str(errors[0])


def join_hands() -> None:
    """Until everything that hung has come back."""
    for hand in threading.enumerate():
        if isinstance(hand, IoThread):
            hand.join(TIMEOUT_S)
            assert not hand.is_alive()


@pytest.mark.parametrize(
    ("step", "name", "last"),
    [
        ("list", "root", False),
        ("open", "commit.json", False),
        ("read", "rank-00000.json", False),
        ("read", "shard-00000", True),
    ],
)
def test_a_load(root: Path, behind: Gate, step: str, name: str, last: bool) -> None:
    """Newer is not passed over for older, and what comes too late touches nothing."""
    loaded, count, wanted = state(), 0, 0

    def act(seen: Seen) -> str:
        nonlocal count
        hit = seen.step == step and seen.path.startswith(str(root)) and seen.path.endswith(name)
        count += hit
        return HOLD if hit and wanted and count >= wanted else PASS

    with Checkpointer(root, answer_s=ANSWER_S) as saves:

        def twice() -> None:
            nonlocal count, wanted
            saves.load(state())
            count, wanted = 0, count if last else 1
            saves.load(loaded)

        behind.act = act
        said = error_of(behind, twice)
        touched = "filled in part and must not be used" if last else "nothing was touched"
        assert said.startswith(f"nothing was loaded, and the state was {touched}: rank 0: " if last
            else f"nothing was loaded, and {touched}: "), said  # fmt: skip
        assert str(root) in said and "has not answered for 0.4 s" in said
        assert "step-000000001" not in said
        with pytest.raises(StorageError, match="was not tried: the file system still owes an answ"):
            saves.load(state())
        behind.release()
        join_hands()
        assert torch.equal(loaded["weights"], state()["weights"])
        found = saves.load(loaded)  # it answers again
    assert found and found.step == 2 and torch.equal(loaded["weights"], state(2.0)["weights"])


def held_at(step: str, name: str) -> Act:
    def act(seen: Seen) -> str:
        return HOLD if seen.step == step and seen.path.endswith(name) else PASS

    return act


def test_a_look_at_every_byte(root: Path, behind: Gate) -> None:
    """Not a word about damages, where nobody knows of any."""
    behind.act = held_at("read", "shard-00000")
    store = Folder(root, ANSWER_S)
    checkpoint = open_checkpoint(store, checkpoint_places(store)[0])
    said = error_of(behind, lambda: verify(checkpoint))
    assert "shard-00000: the file system has not answered for 0.4 s" in said


EXITS = """
import sys
from pathlib import Path
sys.path.append(sys.argv[1])
from tests.checkpoint.syscall_gate import HOLD, PASS, Gate
from outlast.checkpoint.stores.catalog import newest_checkpoint as newest
from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import StalledError

def look():
    try:
        newest(Folder(Path(sys.argv[2]), 0.2), print, verify=True)
    except StalledError as error:
        print(error, flush=True)

gate = Gate(lambda seen: HOLD if seen.path.endswith("shard-00000") else PASS)
gate.run(look, ("read",)).join(30)
assert gate.held
"""


def test_a_process_ends_although_a_read_hangs(root: Path) -> None:
    command = [sys.executable, "-c", EXITS, str(Path(__file__).parents[3]), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if "seccomp" in done.stdout + done.stderr:
        pytest.skip(done.stdout + done.stderr)
    assert done.returncode == 0 and "has not answered for 0.2 s" in done.stdout, done


def test_a_write_that_hangs(tmp_path: Path, behind: Gate) -> None:
    """It leaves nothing under the file's name, also when it comes back; slow sources have time."""
    store = Folder(tmp_path, ANSWER_S)

    def slow() -> Iterator[bytes]:
        assert not threading.Event().wait(1.5 * ANSWER_S)
        yield bytes(2000)

    store.put("a", "slow", slow(), 2000)
    behind.act = held_at("write", "shard.part")
    said = error_of(behind, lambda: store.put("a", "shard", [bytes(10)] * 2, 20), ("write",))
    assert f"{tmp_path}/a/shard: the file system has not answered for 0.4 s" in said
    behind.release()
    join_hands()
    assert store.files("a") == {"slow": 2000}
    store.put("a", "shard", [bytes(10)] * 2, 20)
    assert store.files("a") == {"slow": 2000, "shard": 20}


def test_saves(tmp_path: Path) -> None:
    """Wherever a save hangs, it fails at its deadline; once the file system answers, the next one
    is committed. The older one is untouched."""
    names = {
        "mkdir": "-a2",
        "write": "shard-00000.part",
        "sync": "rank-00000.json.part",
        "link": "commit.json.part",
    }
    with contextlib.ExitStack() as stack:
        desks = {step: Desk(tmp_path / step) for step in names}
        gates = {step: stack.enter_context(gate()) for step in names}
        for step, desk in desks.items():
            gates[step].run(desk.keeper, CHANGES).join(TIMEOUT_S)
            desk.keepers[0].order(order_of(1, desk.root))
        for step, desk in desks.items():
            assert desk.keepers[0].wait(1, TIMEOUT_S).kind == "committed"
            gates[step].act = held_at(step, names[step])
            desk.keepers[0].order(order_of(2, desk.root, deadline_s=0.5))
        for step, desk in desks.items():
            outcome = desk.keepers[0].wait(2, TIMEOUT_S)
            assert outcome.kind == "failed" and gates[step].held, (step, outcome)
            assert "neither finished nor answered within 0.5 s" in outcome.error, outcome
            assert newest(desk.root) == 1
            until(lambda keeper=desk.keepers[0]: not keeper.busy(0), "the hung keeper is dead")
            gates[step].release()
            desk.keepers[0].order(order_of(3, desk.root))
        for desk in desks.values():
            assert desk.keepers[0].wait(3, TIMEOUT_S).kind == "committed" and newest(desk.root) == 3
            desk.close()
