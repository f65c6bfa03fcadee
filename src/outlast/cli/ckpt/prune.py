"""`outlast ckpt prune`: deletion by a retention policy, with reasons."""

from __future__ import annotations

import time

import msgspec

from outlast.checkpoint.stores.catalog import Checkpoint
from outlast.checkpoint.stores.catalog import verify as read_all
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.retention_policy import parse_policy
from outlast.checkpoint.upkeep.retention_policy import prune_store as delete
from outlast.cli.ckpt.target_argument import open_target
from outlast.cli.output_stream import byte_progress, echo, print_json
from outlast.errors import EXIT_DONE, RunDirError
from outlast.launch import run_directory
from outlast.terminal_tables import listing, number_column, text_column
from outlast.text_formatting import plural


class PruneLine(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in the output of `--json`, the newest first."""

    directory: str
    keep: bool
    why: str


def prune(target: str, *, keep: str, dry_run: bool = False, json: bool = False) -> int:
    """Delete the checkpoints that a retention policy does not keep.

    Deletes the oldest first, and only after a newer checkpoint was read and
    verified completely. Always keeps the newest checkpoint, and damaged ones.
    Refuses the directory of a running job: its launcher prunes by its own --keep.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, or a URL (s3://...).
    keep
        Retention policy: one or more of last=2,every=1000,milestone=5000,age=7d,size=10TB.
    dry_run
        Print what would be deleted, and delete nothing.
    json
        Print one JSON array of all checkpoints with the verdict on each.
    """
    policy = parse_policy(keep)
    chosen = open_target(target)
    store, barred = chosen.all_of_it(), chosen.barred()
    if not dry_run:
        _refuse_living(store)
    verdicts = delete(
        store, policy, time.time_ns(), verified=_is_whole, barred=barred, dry_run=dry_run
    )
    if json:
        print_json(
            [PruneLine(directory=v.place.directory, keep=v.keep, why=v.why) for v in verdicts]
        )
        return EXIT_DONE
    table = listing(number_column("step"), *map(text_column, ("attempt", "", "why")))
    verb = "would go" if dry_run else "deleted"
    for place, stays, why in verdicts:
        table.add_row(str(place.step), place.attempt, "kept" if stays else verb, why)
    echo(table)
    count = sum(verdict.keep for verdict in verdicts)
    echo(f"{plural(len(verdicts), 'checkpoint')}: {count} kept, {len(verdicts) - count} {verb}")
    return EXIT_DONE


def _refuse_living(store: Store) -> None:
    """Raise RunDirError if a running launcher uses these checkpoints."""
    if not isinstance(store, Folder):
        return
    run_dir = store.root.parent
    if (run_dir / "run.json").is_file() and run_directory.is_held(run_dir):
        raise RunDirError(
            f"{run_dir} belongs to a running job, whose launcher prunes by its own --keep;"
            " nothing was deleted; use --dry-run, or end the run first"
        )


def _is_whole(checkpoint: Checkpoint) -> bool:
    with byte_progress(f"reading step {checkpoint.place.step}") as advance:
        return not read_all(checkpoint, advance)
