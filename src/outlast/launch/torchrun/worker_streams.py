"""Streams of workers that the launcher displays: torchrun's --redirects, --tee and filter."""

from __future__ import annotations

from argparse import Namespace
from string import Template
from typing import NamedTuple

from outlast import config
from outlast.errors import UsageError
from outlast.launch.torch_definitions import TorchDefinitions

BOTH_STREAMS = 3
_LOGS = "torch.distributed.elastic.multiprocessing.api"
_PREFIX = "[${role_name}${local_rank}]:"  # torchrun's, of streams in --tee only
_torch = TorchDefinitions()


class WorkerStreams(NamedTuple):
    """Streams by rank (1 stdout, 2 stderr, 3 both): all that are displayed, and those of --tee,
    whose lines have a prefix."""

    streams: dict[int, int]
    teed: dict[int, int]
    line_prefix: str  # template of torchrun's fields role_name, rank and local_rank

    @classmethod
    def read(cls, given: Namespace, ranks: int, world: int) -> WorkerStreams:
        """Return the streams by rank; the flags are per local rank, of which each node has
        `ranks`. Raises UsageError."""
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
            (BOTH_STREAMS & ~redirects[rank]) | tees[rank] if rank in shown else 0
            for rank in range(ranks)
        ]
        template = getattr(given, "log_line_prefix_template", None)  # from torch 2.14 on
        return cls(
            {seat: of_local[seat % ranks] for seat in range(world)},
            {seat: tees[seat % ranks] for seat in range(world)},
            template
            or config.torchrun_variable("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
            or _PREFIX,
        )


def line_prefix(template: str, role: str, rank: int, local_rank: int) -> str:
    """Return the prefix of a rank's lines."""
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def _stream_map(text: str, world: int) -> dict[int, int]:
    """Return the streams by rank: 1 stdout, 2 stderr, 3 both. Raises ValueError."""
    if text == "0":
        return dict.fromkeys(range(world), 0)
    parse = _torch.get(_LOGS, "Std").from_str
    of_rank = _torch.get(_LOGS, "to_map")(parse(text), world)
    return {rank: int(streams) for rank, streams in of_rank.items()}
