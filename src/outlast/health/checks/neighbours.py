"""The bandwidth of all-reduces between this node and others: it, or a link of it, may be slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outlast.health.contract import About, Check, Probe, Said, Sample
from outlast.health.neighbours import verdict
from outlast.health.settings import Settings

GB = 1e9


class Pairs(Sample, frozen=True):
    """What all pairs measured, in bytes a second: each node has the same, and judges itself."""

    rank: int
    names: tuple[str, ...]
    pairs: tuple[tuple[int, int, float], ...]


def judge(sample: Pairs, about: About) -> Iterator[Said]:
    wanted = about.settings.ring.gbytes_min
    least = None if wanted is None else wanted * GB
    measured = {(a, b): speed for a, b, speed in sample.pairs}
    world, me = len(sample.names), sample.rank
    found = verdict(world, measured, least)
    mine = {pair: speed for pair, speed in measured.items() if me in pair}
    best = max(mine.values(), default=0.0) / GB
    if found.unclear or not mine:
        yield Said("unknown", f"no pair of {world} nodes was fast: nothing can be told apart")
        return
    if me in found.nodes:
        line = found.least / GB
        text = f"{best:.3g} GB/s at best beside {len(mine)} others, {line:.3g} is expected"
        yield Said("drain", text)
        return
    for pair in sorted(found.links & mine.keys()):
        other = sample.names[pair[0] if pair[1] == me else pair[1]]
        text = f"{measured[pair] / GB:.3g} GB/s to {other}, and both are fast with others"
        yield Said("warn", text, other)
    if not found.links & mine.keys():
        yield Said("healthy", f"{best:.3g} GB/s beside {len(mine)} others")


def _probes(settings: Settings) -> Iterable[Probe[Pairs]]:
    from outlast.health.probes.neighbours import probe

    yield probe(settings)


CHECK = Check("neighbour", "ib-link", Pairs, _probes, judge)
