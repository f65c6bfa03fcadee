"""Query of a lake's page: the flags of `outlast fleet report` that select records."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from outlast import quantities
from outlast.fleet.analysis.exposure import LARGE_GPUS, check_size
from outlast.web.planner_query import given_texts

NAMELESS = "''"  # a cluster or partition without a name, as in a shell
FIELDS = ("since", "until", "cluster", "partition", "above-gpus")
NODE = "node"
TEXT_MAX = 256  # characters of a value: names of hosts are up to 253


class LakeQuery(NamedTuple):
    """Selection of a lake's records. None: as `outlast fleet report` without the flag."""

    since: str | None = None
    until: str | None = None
    cluster: str | None = None
    partition: str | None = None
    above_gpus: int = LARGE_GPUS

    def texts(self) -> dict[str, str]:
        """Return what differs from the default, by key of the address."""
        found = {
            "since": self.since,
            "until": self.until,
            "cluster": _named(self.cluster),
            "partition": _named(self.partition),
            "above-gpus": None if self.above_gpus == LARGE_GPUS else str(self.above_gpus),
        }
        return {key: text for key, text in found.items() if text is not None}

    def encoded(self, **others: str) -> str:
        """Return the query of an address, with other values."""
        return urlencode({**self.texts(), **others})

    def node_link(self, node: str) -> str:
        """Return the address of a node's page; "" without a name."""
        return f"/node?{self.encoded(node=node)}" if node else ""

    def command(self, command: str, lake: Path) -> str:
        """Return a command of `outlast fleet` with the same selection."""
        names = {"cluster": self.cluster, "partition": self.partition}
        flags = {**self.texts(), **{key: name for key, name in names.items() if name is not None}}
        words = [f"--{key}={text}" for key, text in flags.items()]
        return shlex.join(["outlast", "fleet", command, str(lake), *words])


def _named(name: str | None) -> str | None:
    return NAMELESS if name == "" else name


def lake_texts(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return what a query gives, by key. Raises ConfigError."""
    return given_texts(pairs, {*FIELDS, NODE}, TEXT_MAX)


def parse_lake_query(texts: Mapping[str, str]) -> LakeQuery:
    """Return the selection. Raises ConfigError, UsageError."""
    names = {key: texts[key].replace(NAMELESS, "") for key in FIELDS[2:4] if key in texts}
    above = quantities.count("above-gpus", texts.get("above-gpus", str(LARGE_GPUS)))
    check_size(above)
    return LakeQuery(
        texts.get("since"), texts.get("until"), names.get("cluster"), names.get("partition"), above
    )
