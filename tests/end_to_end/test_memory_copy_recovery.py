"""Recovery from memory copies after the loss of workers and a keeper."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from tests.end_to_end.conftest import Outcome, Runner, same, wait_for
from tests.end_to_end.test_failure_recovery import ended, keepers_of

from outlast import events
from outlast.telemetry.event_store import read_events

pytestmark = pytest.mark.process


def holds_all(pid: int) -> bool:
    """Whether a keeper has mapped its worker's two arenas and one for others, and nothing is on its
    way: its sockets are those that it, its readers and its worker listen with."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    arenas = {line.split()[4] for line in maps.splitlines() if "outlast-arena" in line}
    sockets = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            sockets += "socket:" in str(entry.readlink())
    return len(arenas) == 3 and sockets == 4


@pytest.mark.extended
@pytest.mark.parametrize(
    ("copies", "note"),
    [
        ("2", "all 2 copies of a part lie on one host: none survives its loss"),
        pytest.param(
            "xor:4", "a group's parity does not survive the loss of one host",
            marks=pytest.mark.long,
        ),
    ],
    ids=["copies", "parity"],
)  # fmt: skip
def test_ranks_die_with_one_of_their_memories(
    runner: Runner, undisturbed: Outcome, tmp_path: Path, copies: str, note: str
) -> None:
    """The disk had refused step 6: it is in memory alone, and rank 2's part with a peer, or nowhere
    any more, and computed from parity."""
    hold = tmp_path / "hold"
    process = runner.start(
        "--checkpoint-every=6",
        f"--copies={copies}",
        "--fault=full:rank=1,step=6,phase=checkpoint",
        job=("--hold", str(hold)),
    )
    wait_for(lambda: all(hold.with_suffix(f".{r}").exists() for r in range(4)), "step 8")
    wait_for(lambda: ended(tmp_path, 6), "the checkpoint of step 6")
    keepers = keepers_of(process.pid)
    wait_for(lambda: all(map(holds_all, keepers)), "step 6 with peers")
    told = read_events(tmp_path / "run")
    pids = [event.pid for event in told if isinstance(event, events.WorkerSpawned)]
    process.send_signal(signal.SIGSTOP)  # it must not find a survivor between two of the kills
    of_rank_2 = next(p for p in keepers if b"rank 2" in Path(f"/proc/{p}/cmdline").read_bytes())
    for pid in (*pids, of_rank_2):
        os.kill(pid, signal.SIGKILL)
    hold.touch()
    process.send_signal(signal.SIGCONT)
    outcome = runner.end(process)
    same(outcome, undisturbed)
    assert [i["rung"] for i in outcome.summary["incidents"]] == ["rollback"]
    assert outcome.summary["committed_steps_lost"] == 1
    assert "the keeper of rank 2 was killed by signal 9" in outcome.output
    assert note in outcome.output
    assert 6 in {event.step for event in outcome.events if isinstance(event, events.MemoryCopied)}
    peers = [event for event in outcome.events if isinstance(event, events.PeersCopied)]
    assert 0 in {event.seat for event in peers if event.is_whole and event.step == 6}
    assert "and the next version is sent to all of them again" not in outcome.output
