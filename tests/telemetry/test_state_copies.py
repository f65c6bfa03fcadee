"""Newest copies of a job's state by tier, and their lanes in a trace."""

from __future__ import annotations

import json
from pathlib import Path

from tests.telemetry.synthetic_run import SyntheticRun

from outlast.cli.main import main
from outlast.events import (
    AnyEvent,
    CheckpointSaved,
    Drained,
    GenerationOpened,
    MemoryCopied,
    PeersCopied,
    RunStarted,
)
from outlast.telemetry.history.state_copies import newest_copies
from outlast.web.run_content import RunReading


def memory(n: int) -> MemoryCopied:
    return MemoryCopied(t_ns=10 * n, n=n, step=n, seconds=0.1)


def peers(n: int, seat: int, copies: int = 1, strips: int = 0, error: str = "") -> PeersCopied:
    return PeersCopied(
        t_ns=10 * n + seat, seat=seat, n=n, step=n, copies=copies, strips=strips,
        size_bytes=1_000, seconds=0.5, error=error,
    )  # fmt: skip


def opened(n: int) -> GenerationOpened:
    return GenerationOpened(t_ns=10 * n, incident=1, generation=2, n=n)


def test_a_version_is_at_peers_when_all_parts_are() -> None:
    found: list[AnyEvent] = [memory(3), peers(3, 0), memory(6), peers(3, 1), peers(6, 0)]
    copies = newest_copies(found, 2)
    assert copies.memory == memory(6) and copies.peers == peers(3, 1)
    assert newest_copies([*found, peers(6, 1)], 2).peers == peers(6, 1)
    assert newest_copies([*found, peers(6, 1, copies=0, error="gone")], 2).peers == peers(3, 1)
    assert newest_copies([*found, peers(6, 1, copies=1, strips=2)], 2).peers == peers(3, 1)
    assert newest_copies([*found, peers(6, 1, copies=2, strips=2)], 2).peers is not None
    assert newest_copies(found, 3).peers is None
    assert newest_copies([], 2) == (None, None, None, None)


def test_copies_behind_a_rollback_or_of_an_earlier_launch_do_not_count() -> None:
    found: list[AnyEvent] = [memory(3), peers(3, 0), memory(6), peers(6, 0)]
    back = newest_copies([*found, opened(5)], 1)
    assert (back.memory, back.peers) == (memory(3), peers(3, 0))
    assert newest_copies([*found, opened(6)], 1).memory == memory(6)
    assert newest_copies([*found, opened(5), memory(8), opened(8)], 1).memory == memory(8)
    saved = CheckpointSaved(t_ns=1, n=3, step=3, path="c", size_bytes=1, seconds=0.1)
    kept = Drained(t_ns=2, n=3, step=3, where="s3://b", size_bytes=1, seconds=0.1)
    started = RunStarted(t_ns=99, run="r", term=2, world=1, spares=0, script="s", args=())
    later = newest_copies([saved, kept, *found, started], 1)
    assert later == (None, None, saved, kept)


def test_the_first_screen_and_the_trace_have_them(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", world=2).start().steps(5)
    place = {"n": run.n, "step": run.step}
    run.say(MemoryCopied(t_ns=run.t_ns, **place, seconds=0.02))
    for seat in range(2):
        run.say(
            PeersCopied(
                t_ns=run.t_ns, seat=seat, **place, copies=1, size_bytes=1 << 20, seconds=0.1
            )
        )
    run.steps(3).close()
    content = RunReading(run.run_dir).refresh()
    assert content is not None
    (answer,) = (one for one in content.answers if one.key == "safety")
    assert answer.lines[0].startswith("in memory: step 5, ") and " ago" in answer.lines[0]
    assert answer.lines[1].startswith("at peers: step 5, ")
    assert answer.figure == "no checkpoint" and answer.level == "warn"
    out = tmp_path / "trace.json"
    assert main(["trace", str(run.run_dir), "--out", str(out)]) == 0
    events = [one for one in json.loads(out.read_text())["traceEvents"] if one["pid"] == 3]
    names = [one["args"]["name"] for one in events if one["ph"] == "M"]
    assert names == ["copies at peers", "part of rank 0", "part of rank 1"]
    spans = [one for one in events if one["ph"] == "X"]
    assert [(one["tid"], one["name"]) for one in spans] == [
        (seat, "step 5, 1.0 MiB") for seat in range(2)
    ]
    assert all(one["dur"] == 100_000.0 and one["args"]["copies"] == 1 for one in spans)
