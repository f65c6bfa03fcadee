"""What `outlast fleet ingest` has to be told of logs that do not say it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from outlast.fleet.formats import Asked, Format


def _flag(text: str, name: str | None = None) -> Parameter:
    return Parameter(help=text, name=name)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Flags:
    """As flags."""

    as_: Annotated[
        Format | None, _flag("What the logs are, where their content does not tell.", "--as")
    ] = None
    mapping: Annotated[
        Path | None,
        _flag(
            "A TOML file that says which column is what, for CSV and JSON of any shape; else"
            " log.toml beside log.csv."
        ),
    ] = None
    cluster: Annotated[
        str | None, _flag("The name of the cluster, where a log does not say it.")
    ] = None
    zone: Annotated[
        str | None, _flag("The time zone of times that have none, as in Europe/Paris; else UTC.")
    ] = None
    node: Annotated[
        str | None,
        _flag(
            "The node that a log is of, where it does not say so. In it {name} is the log's name"
            " without its ending, and {folder} that of its directory."
        ),
    ] = None
    at: Annotated[
        str | None,
        _flag("When the logs were taken, as in 2024-05-17T10:00; else as old as their files are."),
    ] = None
    boot: Annotated[
        str | None,
        _flag("When the node was booted, for lines of a kernel that count seconds since then."),
    ] = None
    nodes: Annotated[
        int | None,
        _flag("How many nodes there are, for a trace of faults, which names those that had one."),
    ] = None
    gpus_per_node: Annotated[
        int | None, _flag("How many GPUs a node has, for a trace of faults.")
    ] = None
    epoch: Annotated[str | None, _flag("Day 0 of a trace of faults, as in 2024-03-30.")] = None
    delimiter: Annotated[
        str | None,
        _flag("What separates the fields of accounting, where its header does not show it."),
    ] = None
    columns: Annotated[
        str | None,
        _flag("The columns of accounting without a header, as in JobID,State,Start,End."),
    ] = None

    policy: Annotated[
        Path | None,
        _flag("A TOML file with XIDs that mean something else here than the shipped policy says."),
    ] = None

    def asked(self) -> Asked:
        """As the readers take it."""
        return Asked(
            format=self.as_, mapping=self.mapping, cluster=self.cluster or "",
            zone=self.zone or "", node=self.node or "", nodes=self.nodes,
            gpus_per_node=self.gpus_per_node, epoch=self.epoch or "", at=self.at or "",
            boot=self.boot or "", delimiter=self.delimiter or "", columns=self.columns or "",
            policy=self.policy,
        )  # fmt: skip
