"""`outlast ckpt ls`: list of checkpoints, the newest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
from rich.table import Table

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.stores.catalog import checkpoint_places, open_checkpoint
from outlast.checkpoint.stores.store_interfaces import Store
from outlast.checkpoint.upkeep.retention_policy import linked_files
from outlast.cli.ckpt.target_argument import is_older, open_target
from outlast.cli.output_stream import echo, print_json
from outlast.errors import EXIT_DONE, CorruptionError, StorageError
from outlast.terminal_tables import listing, number_column, text_column
from outlast.text_formatting import duration, size

_AT_ONCE = 8  # a bucket has a high latency, and serves many requests at once
_FAILED = ".failed"
_BARRED = "an audit found later that replicas differed; no run starts from it"


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One directory. `state`: committed, barred (an audit put it out of use), uncommitted, damaged,
    older; `why` where that needs words.

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
    lines = list(_lines(chosen.store, chosen.barred()))
    if chosen.place:
        lines = [line for line in lines if line.directory == chosen.place.directory]
    if json:
        print_json(lines)
    elif lines:
        echo(_table(lines))
    else:
        echo(f"{chosen.store.where} holds no checkpoints")
    return EXIT_DONE


def _lines(store: Store, barred: Callable[[SavePoint], bool]) -> Iterator[CheckpointLine]:
    names = store.directories()
    committed = checkpoint_places(store)
    others = [
        place for name in names if (place := SavePoint.parse(name)) and place not in committed
    ]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        read = {
            line.directory: line
            for line in pool.map(lambda p: _committed(store, p, barred(p)), committed)
        }
        begun = {line.directory: line for line in pool.map(lambda p: _begun(store, p), others)}
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


def _committed(store: Store, place: SavePoint, is_barred: bool) -> CheckpointLine:
    try:
        commit = open_checkpoint(store, place).commit
    except (CorruptionError, StorageError) as error:
        return _line(place, state="damaged", why=str(error))
    state, why = ("barred", _BARRED) if is_barred else ("committed", "")
    return _line(
        place,
        state=state,
        why=why,
        job=commit.job,
        world=commit.world,
        size_bytes=commit.size_bytes,
        time_ns=commit.time_ns,
        shared_bytes=sum(size_bytes for _, size_bytes in linked_files(store, place)),
    )


def _begun(store: Store, place: SavePoint) -> CheckpointLine:
    """Return the line of a directory without a commit record: being written, or unfinished."""
    try:
        files = store.files(place.directory)
        failed = sorted(name for name in files if name.endswith(_FAILED))
        reason = store.get(place.directory, failed[0]).decode(errors="replace") if failed else ""
    except (CorruptionError, StorageError) as error:
        return _line(place, state="uncommitted", why=str(error))
    why = f"{failed[0].removesuffix(_FAILED)} failed: {reason.strip()}" if failed else ""
    return _line(place, state="uncommitted", size_bytes=sum(files.values()), why=why)


def _line(place: SavePoint, **known: object) -> CheckpointLine:
    about = {"step": place.step, "n": place.n, "attempt": place.attempt, "line": place.line}
    return msgspec.convert({"directory": place.directory, **about, **known}, CheckpointLine)


def _table(lines: list[CheckpointLine]) -> Table:
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
