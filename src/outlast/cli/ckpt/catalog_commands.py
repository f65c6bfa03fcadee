"""Commands on all checkpoints of a directory: `outlast ckpt ls`, `verify`, `prune`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.table import Table

from outlast.checkpoint.format.manifests import COMMIT, SavePoint
from outlast.checkpoint.stores import catalog
from outlast.checkpoint.stores.catalog import (
    Checkpoint,
    CheckpointDamage,
    checkpoint_places,
    open_checkpoint,
)
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.retention_policy import linked_files, parse_policy, prune_store
from outlast.cli.ckpt.target_argument import is_older, open_target
from outlast.cli.output_stream import byte_progress, echo, print_json
from outlast.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    CorruptionError,
    RunDirError,
    StorageError,
    UsageError,
)
from outlast.launch import run_directory
from outlast.terminal_tables import listing, number_column, text_column
from outlast.text_formatting import duration, plural, size

_AT_ONCE = 8  # a bucket has a high latency, and serves many requests at once
_FAILED = ".failed"
_BARRED = "an audit found later that replicas differed; no run starts from it"


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One directory. `state`: committed, barred (by an audit), uncommitted, damaged, older; `why`:
    its explanation.

    `newest`: what is loaded unless its bytes turn out damaged. `shared_bytes`: of `size_bytes`, in
    files that others have as well. Fields are 0 or "" where unknown.
    """

    directory: str
    state: str
    step: int = 0
    n: int = 0
    attempt: str = ""
    line: int = 0
    job: str = ""
    world: int = 0
    size_bytes: int = 0
    shared_bytes: int = 0
    time_ns: int = 0
    newest: bool = False
    why: str = ""


def ls(target: str, *, json: bool = False) -> int:
    """List checkpoints, the newest first.

    Reads only commit records; `outlast ckpt verify` reads all bytes.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, or a URL (s3://...).
    json
        Print one JSON array.
    """
    chosen = open_target(target)
    lines = list(_listing_lines(chosen.store, chosen.barred()))
    if chosen.place:
        lines = [line for line in lines if line.directory == chosen.place.directory]
    if json:
        print_json(lines)
    elif lines:
        echo(_listing_table(lines))
    else:
        echo(f"{chosen.store.where} holds no checkpoints")
    return EXIT_DONE


def _listing_lines(store: Store, barred: Callable[[SavePoint], bool]) -> Iterator[CheckpointLine]:
    names = store.directories()
    committed = checkpoint_places(store)
    others = [
        place for name in names if (place := SavePoint.parse(name)) and place not in committed
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = {
            line.directory: line
            for line in pool.map(lambda p: _committed_line(store, p, barred(p)), committed)
        }
        begun = {line.directory: line for line in pool.map(lambda p: _begun_line(store, p), others)}
    newest = next((p.directory for p in committed if read[p.directory].state == "committed"), "")
    order = {place: index for index, place in enumerate(committed)}
    for place in sorted(
        [*committed, *others],
        key=lambda p: (*(-each for each in p.position), order.get(p, len(order)), p.attempt),
    ):
        line = read.get(place.directory) or begun[place.directory]
        yield msgspec.structs.replace(line, newest=line.directory == newest)
    for name in sorted(filter(is_older, names), reverse=True):
        yield CheckpointLine(
            directory=name, state="older", why="format 1; this Outlast reads formats 2 to 4"
        )


def _committed_line(store: Store, place: SavePoint, is_barred: bool) -> CheckpointLine:
    try:
        commit = open_checkpoint(store, place).commit
    except (CorruptionError, StorageError) as error:
        return _listing_line(place, state="damaged", why=str(error))
    state, why = ("barred", _BARRED) if is_barred else ("committed", "")
    return _listing_line(
        place,
        state=state,
        why=why,
        job=commit.job,
        world=commit.world,
        size_bytes=commit.size_bytes,
        time_ns=commit.time_ns,
        shared_bytes=sum(size_bytes for _, size_bytes in linked_files(store, place)),
    )


def _begun_line(store: Store, place: SavePoint) -> CheckpointLine:
    """Return the line of a directory without a commit record: being written, or unfinished."""
    try:
        files = store.files(place.directory)
        failed = sorted(name for name in files if name.endswith(_FAILED))
        reason = store.get(place.directory, failed[0]).decode(errors="replace") if failed else ""
    except (CorruptionError, StorageError) as error:
        return _listing_line(place, state="uncommitted", why=str(error))
    why = f"{failed[0].removesuffix(_FAILED)} failed: {reason.strip()}" if failed else ""
    return _listing_line(place, state="uncommitted", size_bytes=sum(files.values()), why=why)


def _listing_line(place: SavePoint, **known: object) -> CheckpointLine:
    about = {"step": place.step, "n": place.n, "attempt": place.attempt, "line": place.line}
    return msgspec.convert({"directory": place.directory, **about, **known}, CheckpointLine)


def _listing_table(lines: list[CheckpointLine]) -> Table:
    now_ns = time.time_ns()
    figures = map(number_column, ("step", "n", "size", "ranks", "age"))
    table = listing(*figures, text_column("attempt"), text_column())
    for line in lines:
        if line.state == "older":
            table.add_row("", "", "", "", "", line.directory, line.why)
            continue
        age = duration(max(0, now_ns - line.time_ns) / 1e9) if line.time_ns else ""
        where = f"line {line.line}" if any(line.line for line in lines) else ""
        shared = f"{size(line.shared_bytes)} shared" if line.shared_bytes else ""
        note = "newest" if line.newest else "" if line.state == "committed" else line.state
        table.add_row(
            str(line.step),
            str(line.n),
            size(line.size_bytes) if line.size_bytes else "",
            str(line.world or ""),
            age,
            line.attempt,
            ": ".join(filter(None, (where, note, shared, line.why))),
        )
    return table


_NAMED_MAX = 8


class DamagedPart(msgspec.Struct, frozen=True):
    """A damaged file, or chunk of a file, and the tensors stored there."""

    file: str
    chunk: int | None
    what: str
    tensors: tuple[str, ...]
    is_unreadable: bool = False  # a fault of the storage: the bytes may be whole


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one checkpoint; it is undamaged where `damages` is empty."""

    directory: str
    size_bytes: int
    seconds: float
    damages: list[DamagedPart]


def verify(
    target: str,
    *,
    step: int | None = None,
    every: Annotated[bool, Parameter(name="--all", negative=())] = False,
    json: bool = False,
) -> int:
    """Read every byte and report damage.

    Damage is reported by file, chunk and tensor.

    Exit code 0: no damage. 1: a checkpoint is damaged or cannot be read.

    Parameters
    ----------
    target
        A directory of checkpoints, a run directory, one checkpoint, or a URL (s3://...).
    step
        Step of the checkpoint (default: the newest).
    every
        Verify all checkpoints with a commit record, the newest first.
    json
        Print one JSON array.
    """
    chosen = open_target(target)
    if every and step is not None:
        raise UsageError("--all and --step exclude each other; give one of them")
    places = checkpoint_places(chosen.all_of_it()) if every else [chosen.choose(step)]
    if not places:  # nothing was verified
        raise UsageError(f"{chosen.store.where} holds no checkpoints; nothing was verified")
    verdicts: list[VerifyReport] = []
    for place in places:
        verdicts.append(_verify_one(chosen.store, place))
        if not json:
            _print_verdict(verdicts[-1])
    if json:
        print_json(verdicts)
    return EXIT_USER_ERROR if any(verdict.damages for verdict in verdicts) else EXIT_DONE


def _verify_one(store: Store, place: SavePoint) -> VerifyReport:
    began = time.monotonic()
    size_bytes = 0
    try:
        checkpoint = open_checkpoint(store, place)
        size_bytes = checkpoint.size_bytes
        with byte_progress(f"step {place.step}") as advance:
            damages = catalog.verify(checkpoint, advance)
    except (CorruptionError, StorageError) as error:
        damages = [
            CheckpointDamage(f"{store.where}/{place.directory}/{COMMIT}", None, str(error), ())
        ]
    return VerifyReport(
        directory=place.directory,
        size_bytes=size_bytes,
        seconds=time.monotonic() - began,
        damages=[DamagedPart(*damage) for damage in damages],
    )


def _print_verdict(verdict: VerifyReport) -> None:
    if not verdict.damages:
        rate = f"{size(round(verdict.size_bytes / verdict.seconds))}/s"
        read = f"{size(verdict.size_bytes)} in {duration(verdict.seconds)}, {rate}"
        echo(f"{verdict.directory}: whole ({read})")
        return
    echo(f"{verdict.directory}: {plural(len(verdict.damages), 'damage')}")
    for damage in verdict.damages:
        echo(f"  {damage.what}")
    lost = sorted({name for damage in verdict.damages for name in damage.tensors})
    if lost and len(verdict.damages) > 1:
        more = f" and {len(lost) - _NAMED_MAX} more" if lost[_NAMED_MAX:] else ""
        echo(f"  damaged in all: {', '.join(lost[:_NAMED_MAX])}{more}")


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
    verdicts = prune_store(
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
        return not catalog.verify(checkpoint, advance)
