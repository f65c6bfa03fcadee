"""A process that takes the next term when the owner's beat stands still, and acts while it owns.

Arguments: a directory that all racers share, and a name. Files in it, besides the store's:

segment-N   one byte for each entry that the owner of term N made durable
taken-N     entries of the term before that the owner of term N found
acts-N      one byte for each entry of term N that its owner acted on
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from outlast.checkpoint.stores.folder_store import Folder
from outlast.launch.terms.term_guard import TermGuard
from outlast.launch.terms.term_records import SuccessorRecord, TermLedger, TermRecord
from outlast.launch.terms.term_store import CheckpointStoreTerms

LEASE_S = 0.1


class Agents:
    """Agents of a term that has none but its owner."""

    def is_alone(self) -> bool:
        return False

    def next_successors(self) -> SuccessorRecord | None:
        return None

    def on_recorded(self, record: SuccessorRecord) -> None:
        raise AssertionError(record)


def length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def append(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b".")


async def race(root: Path, name: str) -> None:
    ledger = TermLedger(CheckpointStoreTerms(Folder(root), "terms"), "race")
    term = 0
    while True:
        newest = ledger.newest(term)
        term = newest.term if newest is not None else term
        before = ledger.read_beat(term)
        await asyncio.sleep(LEASE_S)
        if ledger.newest(term) is not None or ledger.read_beat(term) != before:
            continue
        claim = f"{name} {os.urandom(8).hex()}"
        if ledger.claim(TermRecord(term=term + 1, run="race", host=name, claim=claim)):
            term += 1
            await own(root, ledger, term)


async def own(root: Path, ledger: TermLedger, term: int) -> None:
    with (root / f"taken-{term}").open("x") as file:
        file.write(str(length(root / f"segment-{term - 1}")))
    deposed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    guard = TermGuard(ledger, term, ("127.0.0.1", 1), LEASE_S, deposed.set_result, print)
    rounds = asyncio.create_task(guard.run(Agents()))
    while not deposed.done():
        append(root / f"segment-{term}")
        confirmed = asyncio.Event()
        guard.confirm(confirmed.set)
        waiting = asyncio.create_task(confirmed.wait())
        await asyncio.wait({waiting, deposed}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if confirmed.is_set():
            append(root / f"acts-{term}")
    await rounds


if __name__ == "__main__":
    asyncio.run(race(Path(sys.argv[1]), sys.argv[2]))
