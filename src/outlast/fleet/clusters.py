"""Selection of one cluster of a lake: what belongs to two clusters is never computed together."""

from __future__ import annotations

from functools import lru_cache

import polars as pl

from outlast.errors import UsageError
from outlast.fleet.lake import Lake
from outlast.fleet.tables import KIND_OF, NAMES, Tables
from outlast.text_formatting import plural

SHOWN = 8  # names of clusters in a message


@lru_cache(maxsize=4)  # a lake does not change once it is opened
def names(lake: Lake) -> dict[str, set[str]]:
    """Return the cluster names of each kind of record in the whole lake; "" is one without."""
    tables = lake.tables()
    return {
        kind: set(getattr(tables, kind).select(pl.col("cluster").unique()).collect()["cluster"])
        for kind in KIND_OF
    }


def resolve(lake: Lake, asked: str | None) -> str:
    """Return the cluster to analyse: the one asked for, else the only one of the lake.

    "" stands for records whose source names no cluster. Raises UsageError where the lake holds
    several clusters and none was asked for, and for a cluster that the lake does not hold.
    """
    of = names(lake)
    named = sorted(set[str]().union(*of.values()) - {""})
    several = len(named) > 1 or ("" in of["jobs"] and len(of["jobs"]) > 1)
    known = [*named, ""] if any("" in each for each in of.values()) else named
    if asked is not None:
        if asked not in known:
            raise UsageError(f"--cluster {asked}: {lake.path} has {_listed(known)}")
        return asked
    if several:
        raise UsageError(
            f"{lake.path} holds several clusters, which are not computed together: say --cluster"
            f" with one of {_listed(known)}"
        )
    return named[0] if named else ""


def select(tables: Tables, lake: Lake, cluster: str, notes: list[str]) -> Tables:
    """Return the records of one cluster of a lake.

    Records without a cluster belong to it where it is the only one that the lake names, except
    jobs where some jobs have the name: the same jobs may have been read with it and without.
    Others are left out, and `notes` gets how many.
    """
    of = names(lake)
    named = set[str]().union(*of.values()) - {""}
    only = named <= {cluster}
    one = pl.lit(cluster)
    chosen: dict[str, pl.LazyFrame] = {}
    left: dict[str, int] = {}
    for kind in NAMES.values():
        frame: pl.LazyFrame = getattr(tables, kind)
        filled = only and "" in of[kind] and (kind != "jobs" or of[kind] == {""})
        if filled:
            own = pl.col("cluster").is_in(["", cluster])
            chosen[kind] = frame.filter(own).with_columns(cluster=one)
            continue
        chosen[kind] = frame if of[kind] <= {cluster} else frame.filter(pl.col("cluster") == one)
        if cluster and "" in of[kind]:
            left[kind] = int(frame.select((pl.col("cluster") == "").sum()).collect().item())
    said = [plural(many, kind[:-1]) for kind, many in left.items() if many]
    if said:
        notes.append(
            f"{' and '.join(said)} of no named cluster left out: read their logs again with"
            f" --cluster, into a new lake, or look at them with --cluster ''"
        )
    return tables._replace(**chosen)


def _listed(known: list[str]) -> str:
    shown = [name or "'' (no cluster named)" for name in known]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more
