"""`outlast fleet ingest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from outlast.cli.fleet.asking import Flags
from outlast.cli.stream import Printer, as_json, say, tell
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.fleet.ingest import Read, Summary
from outlast.fleet.ingest import ingest as ingested
from outlast.fleet.lake import said
from outlast.fleet.tables import Name
from outlast.text_formatting import plural

LOGS_SHOWN = 20  # of more, only those that have something odd


def ingest(
    lake: Path,
    /,
    *source: Path,
    flags: Flags | None = None,
    anonymize: Path | None = None,
    json: bool = False,
) -> int:
    """Read logs into a lake, from which the other commands answer.

    What a log is, is seen from its content. Rows that cannot be read are kept
    with their reason in LAKE/rejects. A log that was read before changes nothing;
    if one of several cannot be read, none is taken over.

    Parameters
    ----------
    lake
        The directory, which is made where there is none.
    source
        Logs of any kinds, and directories of `outlast run`.
    anonymize
        Replace the names of people, jobs, hosts and clusters by means of the key in this file,
        which is made where there is none. Keep it for later readings, and to yourself.
    json
        One JSON object instead of text.
    """
    if not source:
        raise UsageError("which logs? `outlast fleet ingest LAKE LOG...`; nothing was read")
    asked = (flags or Flags()).asked()
    names = None
    if anonymize:
        from outlast.fleet.anonymous import names_of

        names = names_of(anonymize, lake)
    try:
        with _progress() as on_progress:
            found = ingested(lake, source, asked, names, on_progress)
    except KeyboardInterrupt:
        tell(f"outlast: interrupted: {lake} is whole, and has all of these logs or none of them")
        return EXIT_INTERRUPTED
    if json:
        as_json(found)
    else:
        _show(found)
    return EXIT_DONE


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    console = Printer(stderr=True)
    if not console.is_terminal:
        yield lambda _source, _rows: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda source, rows: bar.update(task, description=f"{source}: {rows:,} rows")


def _show(found: Summary) -> None:
    many = len(found.read) > LOGS_SHOWN
    plain: list[Read] = []
    for one in found.read:
        if many and (one.before or _is_plain(one)):
            plain.append(one)
        else:
            _show_one(one)
    if plain:
        before = sum(one.before for one in plain)
        known = f", {before:,} of them read before" if before else ""
        say(f"{plural(len(plain), 'log')} of which nothing is to be said{known}")
    for kind, added in found.added.items():
        more = [f"{added.again:,} of them known already"] if added.again else []
        more += [f"{added.replaced:,} replaced what was known first"] if added.replaced else []
        say(f"{kind}: {added.records:,} read{''.join(f', {each}' for each in more)}")
    for each in found.odd:
        say(f"odd: {each}")
    say(f"{found.lake} holds {_counts(found.rows) or 'nothing'}")
    if found.since_ns is not None and found.until_ns is not None:
        say(f"  from {said(found.since_ns)} until {said(found.until_ns)}")


def _is_plain(one: Read) -> bool:
    return not (one.source.rejects or one.source.odd or one.source.notes)


def _counts(of: Mapping[Name, int]) -> str:
    return ", ".join(plural(rows, kind.removesuffix("s")) for kind, rows in of.items())


def _show_one(one: Read) -> None:
    source = one.source
    if one.before:
        say(f"{source.name}: read before, on {said(source.read_ns)}: nothing to do")
        return
    say(f"{source.name}: {source.format}")
    say(f"  {plural(source.rows, 'row')}: {_counts(source.records) or 'no records'}")
    if source.since_ns is not None and source.until_ns is not None:
        say(f"  from {said(source.since_ns)} until {said(source.until_ns)}")
    for what, rows in source.skipped.items():
        say(f"  {rows:,} left out, as no record: {what}")
    for what, rows in source.odd.items():
        say(f"  {rows:,} odd, but kept: {what}")
    for reason, rows in source.rejects.items():
        say(f"  {rows:,} rejected: {reason}")
        for each in (each for each in one.examples if each.reason == reason):
            say(f"    line {each.line}: {each.text[:100]}")
    if source.rejects:
        say(f"  all of them are in rejects/{source.id}.jsonl")
    for note in source.notes:
        say(f"  note: {note}")
