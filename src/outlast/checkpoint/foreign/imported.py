"""What an import comes to: a checkpoint of one rank, and what could not be taken along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from outlast.checkpoint.foreign.dcp_kept import SHARED
from outlast.checkpoint.foreign.entries import own_of_nobody, shared_of
from outlast.checkpoint.foreign.naming import OBJECT
from outlast.checkpoint.foreign.written import (
    Item,
    commit,
    new_save,
    plan_of,
    write_part,
)
from outlast.checkpoint.record import Place
from outlast.checkpoint.storage import Store
from outlast.errors import CodecError, OutlastError


class Imported(NamedTuple):
    """A checkpoint that was imported. `skipped`: what was left out, by name, and why."""

    place: Place
    tensors: tuple[str, ...]
    objects: tuple[str, ...]
    skipped: Mapping[str, str]


def import_items(
    store: Store,
    items: Sequence[Item],
    objects: Mapping[str, Any],
    *,
    step: int,
    job: str,
    by: str,
    skipped: Mapping[str, str] | None = None,
) -> Imported:
    """Write and commit a checkpoint of these tensors and plain values.

    Raises what `write_part` and `commit` raise; the directory is removed then. CodecError for a
    tensor with the name of an object of DCP's, which its planner would unpickle at a load.
    """
    if forged := next((item.name for item in items if item.name.startswith(OBJECT)), ""):
        raise CodecError(
            f"{forged} is what an object that torch unpickles is called here, and it is a tensor;"
            " nothing was written; leave it out, or rename it"
        )
    save = new_save(store, job, step, 1, plan_of((0, item.name, item.box) for item in items))
    place = save.place
    names = tuple(dict.fromkeys(item.name for item in items))
    blobs = {SHARED: shared_of(names, objects), "own": own_of_nobody()}
    try:
        commit(store, save, [write_part(store, save, 0, items, blobs)], by)
    except BaseException:  # Ctrl-C as well: nothing half stays
        with suppress(OutlastError):  # the first error is the one to report
            store.remove(place.directory)
        raise
    return Imported(place, names, tuple(objects), skipped or {})
