"""Check of the bandwidth to other nodes: all-reduces of pairs, and the slow node or link."""

from __future__ import annotations

import datetime
import platform
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from outlast.config import python_executable
from outlast.health.check_contract import (
    AbsentError,
    Check,
    JudgeContext,
    Observation,
    Probe,
    Sample,
    ToolError,
    run_tool,
)
from outlast.health.check_settings import CheckSettings, RingSettings

Pair = tuple[int, int]  # the lower first
PairSpeeds = dict[Pair, float]  # bytes per second; 0 without an answer
Search = Generator[list[Pair], Mapping[Pair, float], PairSpeeds]

SLOW_SHARE = 0.6  # of a good pair's bandwidth, if no minimum is configured
GOOD_QUARTILE = 0.75  # of the pairs of neighbours: a slow node makes two of them slow
PARTNERS_MAX = 3  # fast nodes that a suspect is measured beside


class PairVerdict(NamedTuple):
    """Slow nodes and links, and the threshold in bytes per second.

    `unclear`: no pair was fast, so slow nodes cannot be identified.
    """

    nodes: frozenset[int]
    links: frozenset[Pair]
    least: float
    unclear: bool


def search_slow(world: int, least: float | None) -> Search:
    """Yield rounds of pairs, receive their measurements, and return them all.

    `least`: bytes per second of a fast pair; None takes a share of the upper quartile of
    neighbours.
    """
    measured: PairSpeeds = {}
    for pairs in _ring(world):
        measured |= yield pairs
    for _ in range(PARTNERS_MAX):
        pairs = _suspects_beside_fast(world, measured, threshold(world, measured, least))
        if not pairs:
            break
        measured |= yield pairs
    return measured


def _ring(world: int) -> list[list[Pair]]:
    pairs = list(pairwise(range(world)))
    rounds = [pairs[0::2], pairs[1::2]]
    if world > 2:
        last: Pair = (0, world - 1)
        if world % 2:
            rounds.append([last])
        else:
            rounds[1].append(last)
    return [pairs_of_round for pairs_of_round in rounds if pairs_of_round]


def threshold(world: int, measured: PairSpeeds, least: float | None) -> float:
    """Return the bandwidth of a fast pair in bytes/s: `least`, or a share of the ring's."""
    if least is not None:
        return least
    ring = sorted(measured.get(pair, 0.0) for pairs in _ring(world) for pair in pairs)
    return SLOW_SHARE * ring[int(GOOD_QUARTILE * (len(ring) - 1) + 0.5)] if ring else 0.0


def _fast(measured: PairSpeeds, least: float) -> set[int]:
    """Return the nodes of fast pairs: neither node of such a pair is slow."""
    return {node for pair, speed in measured.items() if speed >= least > 0 for node in pair}


def _suspects_beside_fast(world: int, measured: PairSpeeds, least: float) -> list[Pair]:
    """Pair each node that has no fast pair with a fast node that it was not measured with."""
    fast = _fast(measured, least)
    free = sorted(fast)
    pairs: list[Pair] = []
    for suspect in sorted(set(range(world)) - fast):
        for other in free:
            pair = (min(suspect, other), max(suspect, other))
            if pair not in measured:
                pairs.append(pair)
                free.remove(other)
                break
    return pairs


def judge_pairs(world: int, measured: PairSpeeds, least: float | None) -> PairVerdict:
    """Return the nodes without any fast pair, and the slow links between two fast nodes."""
    line = threshold(world, measured, least)
    fast = _fast(measured, line)
    if not fast:
        return PairVerdict(frozenset(), frozenset(), line, unclear=True)
    slow = frozenset(range(world)) - fast
    links = {pair for pair, speed in measured.items() if speed < line and not slow & set(pair)}
    return PairVerdict(slow, frozenset(links), line, unclear=False)


GB = 1e9


class PairsSample(Sample, frozen=True):
    """Bandwidth of all pairs in bytes per second; each node has all of them and judges itself."""

    rank: int
    names: tuple[str, ...]
    pairs: tuple[tuple[int, int, float], ...]


def judge(sample: PairsSample, about: JudgeContext) -> Iterator[Observation]:
    """Judge this node's bandwidth and its links."""
    wanted = about.settings.ring.gbytes_min
    least = None if wanted is None else wanted * GB
    measured = {(a, b): speed for a, b, speed in sample.pairs}
    world = len(sample.names)
    me = sample.rank
    found = judge_pairs(world, measured, least)
    mine = {pair: speed for pair, speed in measured.items() if me in pair}
    best = max(mine.values(), default=0.0) / GB
    if found.unclear or not mine:
        yield Observation(
            "unknown", f"no pair of {world} nodes was fast: no slow node can be identified"
        )
        return
    if me in found.nodes:
        line = found.least / GB
        text = f"{best:.3g} GB/s at best with {len(mine)} other nodes; {line:.3g} is expected"
        yield Observation("drain", text)
        return
    for pair in sorted(found.links & mine.keys()):
        other = sample.names[pair[0] if pair[1] == me else pair[1]]
        text = f"{measured[pair] / GB:.3g} GB/s to {other}; both are fast with other nodes"
        yield Observation("warn", text, other)
    if not found.links & mine.keys():
        yield Observation("healthy", f"{best:.3g} GB/s with {len(mine)} other nodes")


def _probes(settings: CheckSettings) -> Iterable[Probe[PairsSample]]:

    yield probe(settings)


CHECK = Check("neighbour", "ib-link", PairsSample, _probes, judge)


WARM = 2
TIMED = 5


def probe(settings: CheckSettings) -> Probe[PairsSample]:
    """Return the probe of the configured ring."""
    return Probe("", partial(take, settings.ring), settings.ring.within_s)


def take(ring: RingSettings) -> PairsSample:
    """Measure in a process of its own.

    Raises AbsentError if no ring is configured, ToolError if torch is not installed.
    """
    if not ring.address:
        raise AbsentError("no ring of neighbours was requested (--ring)")
    if find_spec("torch") is None:
        raise ToolError("torch is not installed")
    settings = msgspec.json.encode(ring).decode()
    alone = [python_executable(), "-m", "outlast.health.checks.neighbour_check", settings]
    return msgspec.json.decode(run_tool(alone, within_s=ring.within_s), type=PairsSample)


def measure(ring: RingSettings) -> PairsSample:
    """Measure in this process. Raises torch's errors if the nodes cannot connect."""
    torch = import_module("torch")
    dist = import_module("torch.distributed")
    host, _, port = ring.address.rpartition(":")
    step = datetime.timedelta(seconds=ring.step_s)
    store = dist.TCPStore(
        host,
        int(port),
        ring.world,
        ring.rank == 0,
        timeout=datetime.timedelta(seconds=ring.within_s),
    )
    store.set(f"name{ring.rank}", platform.node().partition(".")[0])
    names = tuple(store.get(f"name{k}").decode() for k in range(ring.world))
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore("ring", store),
        rank=ring.rank,
        world_size=ring.world,
        timeout=step,
    )
    try:
        return PairsSample(
            rank=ring.rank, names=names, pairs=_measure_rounds(torch, dist, store, ring)
        )
    finally:
        _leave_ring(store, ring)


def _measure_rounds(
    torch: Any, dist: Any, store: Any, ring: RingSettings
) -> tuple[tuple[int, int, float], ...]:
    least = None if ring.gbytes_min is None else ring.gbytes_min * 1e9
    steps = search_slow(ring.world, least)
    try:
        pairs = next(steps)
        while True:
            pairs = steps.send(_run_round(torch, dist, store, ring, pairs))
    except StopIteration as end:
        return tuple((a, b, speed) for (a, b), speed in end.value.items())


def _run_round(
    torch: Any, dist: Any, store: Any, ring: RingSettings, pairs: list[Pair]
) -> PairSpeeds:
    """Measure the pairs of a round and return their speeds.

    All ranks create each group; the lower rank of a pair publishes its measurement.
    """
    step = datetime.timedelta(seconds=ring.step_s)
    groups = {pair: dist.new_group(list(pair), timeout=step) for pair in pairs}
    for pair, group in groups.items():
        if ring.rank in pair:
            speed = _speed(torch, dist, group, ring.mbytes * 10**6)
            if ring.rank == pair[0]:
                store.set(_key(pair), repr(speed))
    return {pair: _pair_answer(store, pair, 2 * step) for pair in pairs}


def _key(pair: Pair) -> str:
    return f"pair{pair[0]}-{pair[1]}"


def _pair_answer(store: Any, pair: Pair, within: datetime.timedelta) -> float:
    """Return a pair's speed in bytes per second; 0 without an answer in time.

    All ranks take the first answer that any rank published, so that they stay in step.
    """
    try:
        store.wait([_key(pair)], within)
        speed = store.get(_key(pair)).decode()
    except RuntimeError:
        speed = "0.0"
    return float(store.compare_set(f"agreed {_key(pair)}", "", speed).decode())


def _speed(torch: Any, dist: Any, group: Any, size_bytes: int) -> float:
    """Return the best of a few all-reduces in bytes per second; 0 if the peer did not come."""
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


def _leave_ring(store: Any, ring: RingSettings) -> None:
    """Keep rank 0, which hosts the store, until all other ranks have read their results."""
    finished = store.add("left", 1)
    until = time.monotonic() + ring.step_s
    while ring.rank == 0 and finished < ring.world and time.monotonic() < until:
        time.sleep(0.02)  # a count in a store cannot be waited for
        finished = store.add("left", 0)


if __name__ == "__main__":
    sys.stdout.buffer.write(
        msgspec.json.encode(measure(msgspec.json.decode(sys.argv[1], type=RingSettings)))
    )
