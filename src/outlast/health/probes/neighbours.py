"""All-reduces of pairs, by torch over gloo or NCCL, one process a node, all in step.

Every node runs the same search over the same measurements, which they share through a store at the
first one; so nobody leads. Each step has a deadline, and a pair that missed it measured nothing.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec

from outlast.config import python_executable
from outlast.health.checks.neighbours import Pairs
from outlast.health.contract import AbsentError, Probe
from outlast.health.neighbours import Measured, Pair, search
from outlast.health.probes.asking import ToolError, said
from outlast.health.settings import Ring, Settings

WARM, TIMED = 2, 5


def probe(settings: Settings) -> Probe[Pairs]:
    return Probe("", partial(take, settings.ring), settings.ring.within_s)


def take(ring: Ring) -> Pairs:
    """Raises AbsentError where no ring was asked for, ToolError where torch is not installed."""
    if not ring.address:
        raise AbsentError("no ring of neighbours was asked for (--ring)")
    if find_spec("torch") is None:
        raise ToolError("torch is not installed")
    asked = msgspec.json.encode(ring).decode()
    alone = [python_executable(), "-m", "outlast.health.probes.neighbours", asked]
    return msgspec.json.decode(said(alone, within_s=ring.within_s), type=Pairs)


def measure(ring: Ring) -> Pairs:
    """In this process. Raises what torch raises where the nodes cannot meet."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")
    host, _, port = ring.address.rpartition(":")
    step = datetime.timedelta(seconds=ring.step_s)
    store = dist.TCPStore(
        host, int(port), ring.world, ring.rank == 0,
        timeout=datetime.timedelta(seconds=ring.within_s),
    )  # fmt: skip
    store.set(f"name{ring.rank}", platform.node().partition(".")[0])
    names = tuple(store.get(f"name{k}").decode() for k in range(ring.world))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.PrefixStore("ring", store),
        rank=ring.rank, world_size=ring.world, timeout=step,
    )  # fmt: skip
    try:
        return Pairs(rank=ring.rank, names=names, pairs=_searched(torch, dist, store, ring))
    finally:
        _leave(store, ring)


def _searched(torch: Any, dist: Any, store: Any, ring: Ring) -> tuple[tuple[int, int, float], ...]:
    least = None if ring.gbytes_min is None else ring.gbytes_min * 1e9
    steps = search(ring.world, least)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(_round(torch, dist, store, ring, asked))
    except StopIteration as end:
        return tuple((a, b, speed) for (a, b), speed in end.value.items())


def _round(torch: Any, dist: Any, store: Any, ring: Ring, asked: list[Pair]) -> Measured:
    """A group is made by all ranks, whoever is in it; its lower rank tells what it measured."""
    step = datetime.timedelta(seconds=ring.step_s)
    groups = {pair: dist.new_group(list(pair), timeout=step) for pair in asked}
    for pair, group in groups.items():
        if ring.rank in pair:
            speed = _speed(torch, dist, group, ring.mbytes * 10**6)
            if ring.rank == pair[0]:
                store.set(_key(pair), repr(speed))
    return {pair: _told(store, pair, 2 * step) for pair in asked}


def _key(pair: Pair) -> str:
    return f"pair{pair[0]}-{pair[1]}"


def _told(store: Any, pair: Pair, within: datetime.timedelta) -> float:
    """0 where nothing was told in time. All take the first answer that anybody gave, so that they
    stay in step."""
    try:
        store.wait([_key(pair)], within)
        told = store.get(_key(pair)).decode()
    except RuntimeError:
        told = "0.0"
    return float(store.compare_set(f"agreed {_key(pair)}", "", told).decode())


def _speed(torch: Any, dist: Any, group: Any, size_bytes: int) -> float:
    """Bytes a second, of the best of a few; 0 where the other did not come."""
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    data = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    try:
        for turn in range(WARM + TIMED):
            began = time.perf_counter()
            dist.all_reduce(data, group=group)
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= WARM:
                best_s = min(best_s, time.perf_counter() - began)
    except RuntimeError:
        return 0.0
    return data.numel() * 4 / best_s


def _leave(store: Any, ring: Ring) -> None:
    """The store is where rank 0 is, which waits until all others have what they need."""
    left = store.add("left", 1)
    until = time.monotonic() + ring.step_s
    while ring.rank == 0 and left < ring.world and time.monotonic() < until:
        time.sleep(0.02)  # a count in a store cannot be waited for
        left = store.add("left", 0)


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(measure(msgspec.json.decode(sys.argv[1], type=Ring)))
    )
