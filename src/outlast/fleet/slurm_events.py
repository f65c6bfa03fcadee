"""Outages of nodes as `sacctmgr show event --parsable2` lists them."""

from __future__ import annotations

from pathlib import Path

from outlast.fleet import mapped, sources
from outlast.fleet.mapping import Mapping
from outlast.fleet.readings import Reading

NEEDED = ("nodename", "timestart", "timeend")
COLUMNS = {"time": "timestart", "until": "timeend", "node": "nodename", "cluster": "cluster",
           "detail": "reason"}  # fmt: skip
OF_CLUSTER = "event of the whole cluster"


def is_one(head: str) -> bool:
    """Return whether a text begins with the header of such a list."""
    return set(NEEDED) <= {*_header(head)}


def read(path: Path, given: mapped.Given) -> Reading:
    """Read node events as outages; one whose TimeEnd is Unknown lasts."""
    with sources.as_text(path) as file:
        first = file.readline(sources.LINE_CHARS_MAX)
    names = dict(zip(_header(first), (name.strip() for name in first.split("|")), strict=True))
    columns: dict[str, str | list[str]] = {
        ours: names[theirs] for ours, theirs in COLUMNS.items() if theirs in names
    }
    mapping = Mapping(
        rows="outages",
        columns=columns,
        delimiter="|",
        quotes=False,
        constants={"symptom": "other"},
    )
    given = given._replace(passed_over=(names["nodename"], OF_CLUSTER))
    return mapped.read(path, mapping, given)


def _header(head: str) -> list[str]:
    return [name.strip().lower() for name in head.partition("\n")[0].split("|")]
