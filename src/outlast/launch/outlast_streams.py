"""Streams of workers that the launcher displays: torchrun's --redirects, --tee and filter."""

from __future__ import annotations

from argparse import Namespace

from outlast.errors import UsageError
from outlast.launch.torch_definitions import TorchDefinitions

_BOTH_STREAMS = 3
_LOGS = "torch.distributed.elastic.multiprocessing.api"
_torch = TorchDefinitions()


def displayed_streams(given: Namespace, ranks: int, world: int) -> dict[int, int]:
    """Return the displayed streams by rank: 1 stdout, 2 stderr, 3 both; the flags are per local
    rank, of which each node has `ranks`. Raises UsageError."""
    try:
        redirects, tees = _stream_map(given.redirects, ranks), _stream_map(given.tee, ranks)
        shown = set(range(ranks))
        if given.local_ranks_filter:
            shown = {int(rank) for rank in given.local_ranks_filter.split(",")}
    except ValueError as error:
        raise UsageError(
            f"--redirects, --tee or --local-ranks-filter: {error};"
            " give 0 to 3, or RANK:0-3 pairs, and ranks as 0,1,2"
        ) from error
    of_local = [
        (_BOTH_STREAMS & ~redirects[rank]) | tees[rank] if rank in shown else 0
        for rank in range(ranks)
    ]
    return {seat: of_local[seat % ranks] for seat in range(world)}


def _stream_map(text: str, world: int) -> dict[int, int]:
    """Return the streams by rank: 1 stdout, 2 stderr, 3 both. Raises ValueError."""
    if text == "0":
        return dict.fromkeys(range(world), 0)
    parse = _torch.get(_LOGS, "Std").from_str
    of_rank = _torch.get(_LOGS, "to_map")(parse(text), world)
    return {rank: int(streams) for rank, streams in of_rank.items()}
