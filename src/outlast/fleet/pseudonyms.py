"""Pseudonyms for people, hosts and clusters in records.

With the same key a name always has the same pseudonym. Without the key it cannot be recovered, not
even by trying names.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import polars as pl

from outlast.errors import StorageError, UsageError
from outlast.fleet import host_lists
from outlast.fleet.formats.log_reading import RecordBatch, Reject
from outlast.fleet.record_tables import Name

KEY_BYTES = 32
_WORD_BYTES = 6
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBERS = re.compile(r"\d+(_\[?[\d,\-%]+\]?)?(\+\d+)?")  # a job as Slurm counts them
_LABEL = re.compile(r"(?:NCCL_IB_ADAPTIVE_ROUTING=)?(?:\d|on|off)")
# A PCI address, or the name that every machine has for a part of its own.
_DEVICE = re.compile(
    r"(?:PCI:)?[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}(?:\.\d)?)?"
    r"|(?:gpu|nvidia|mlx[45]_|ib|ibp|eth|bond|nvme|sd[a-z]|cpu|port|nvswitch|dimm)? ?\d{0,3}"
    r"(?:[/:]\d{1,3})?",
    re.IGNORECASE,
)
# The kind of name in each column that can identify a person, project or machine.
_COLUMNS: dict[Name, dict[str, str]] = {
    "jobs": {
        "cluster": "cluster", "job": "job", "name": "name", "user": "user", "account": "account",
        "partition": "partition", "qos": "qos", "hosts": "hosts", "excluded": "hosts",
        "failed_node": "hosts",
    },
    "findings": {"cluster": "cluster", "node": "host", "device": "device", "detail": "text"},
    "outages": {"cluster": "cluster", "node": "host", "detail": "text"},
    "repairs": {"cluster": "cluster", "node": "host", "detail": "text"},
    "nodes": {"cluster": "cluster", "node": "host", "rack": "rack", "pod": "pod"},
    "checks": {"cluster": "cluster"},
    "interruptions": {"cluster": "cluster", "job": "job", "node": "host"},
    "costs": {"cluster": "cluster", "job": "job"},
    "bandwidths": {"cluster": "cluster", "run": "run", "label": "label", "hosts": "hosts"},
}  # fmt: skip


class Pseudonyms:
    """Keyed pseudonyms of names."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.mark = self.replaced("key", "")  # identifies the key without revealing it

    def replaced(self, kind: str, name: str) -> str:
        """Return the pseudonym of a name, which depends on its kind."""
        digest = hashlib.blake2b(
            f"{kind}\0{name}".encode(errors="surrogatepass"), key=self._key, digest_size=_WORD_BYTES
        )
        return f"{kind}-{digest.hexdigest()}"

    def part(self, part: RecordBatch, source: str) -> RecordBatch:
        """Return records with pseudonyms, without free text; of rejects only place and reason."""
        tables: dict[Name, pl.DataFrame] = {
            kind: self.table(kind, records) for kind, records in part.tables.items()
        }
        rejects = [
            Reject(source, entry.line, _without_quotes(entry.reason), "") for entry in part.rejects
        ]
        return RecordBatch(tables, rejects)

    def table(self, kind: Name, records: pl.DataFrame) -> pl.DataFrame:
        """Return records of one kind with pseudonyms and without free text."""
        return records.with_columns(
            _map_distinct(records[column], self._replacer(what))
            for column, what in _COLUMNS[kind].items()
        )

    def reasons(self, rejects: Mapping[str, int]) -> dict[str, int]:
        """Return the reasons of rejects without quoted content."""
        found: Counter[str] = Counter()
        for reason, rows in rejects.items():
            found[_without_quotes(reason)] += rows
        return dict(found)

    def _replacer(self, what: str) -> Callable[[str], str]:
        if what == "text":
            return lambda _text: ""
        if what == "hosts":
            return self._hosts
        if what == "host":
            return self._host
        if what == "job":
            return partial(self._unless, _NUMBERS, what)
        if what == "label":
            return partial(self._unless, _LABEL, what)
        if what == "device":
            return partial(self._unless, _DEVICE, what)
        return partial(self.replaced, what)

    def _unless(self, plain: re.Pattern[str], kind: str, text: str) -> str:
        return text if plain.fullmatch(text) else self.replaced(kind, text)

    def _host(self, name: str) -> str:
        """Return the pseudonyms of a host and of its domain; n1.example.org keeps that of n1."""
        first, dot, rest = name.partition(".")
        if not dot or not first or first.isdecimal():
            return self.replaced("host", name)
        return f"{self.replaced('host', first)}.{self.replaced('domain', rest)}"

    def _hosts(self, text: str) -> str:
        """Return a host list of as many pseudonyms; an invalid list is one host."""
        try:
            found = host_lists.expand(text)
        except UsageError:
            found = [text]
        return ",".join(sorted(self._host(host) for host in found))


def load_pseudonyms(key_file: Path, lake: Path) -> Pseudonyms:
    """Return the pseudonyms of the key in this file, which is created if missing.

    Raises UsageError for an invalid key or a file in the lake, StorageError.
    """
    if key_file.resolve().is_relative_to(lake.resolve()):
        raise UsageError(
            f"{key_file} lies in the lake: a reader of the lake could recover the names; keep the"
            " key elsewhere"
        )
    try:
        if not key_file.exists():
            _create_key(key_file)
        text = key_file.read_text(encoding="ascii").strip()
        key = bytes.fromhex(text)
    except OSError as error:
        raise StorageError(f"key {key_file}: {error.strerror}; nothing was read") from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"{key_file} is no key of `outlast fleet ingest --anonymize` ({2 * KEY_BYTES} digits);"
            " name a new file to have one made"
        )
    return Pseudonyms(key)


def _create_key(key_file: Path) -> None:
    file = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, secrets.token_hex(KEY_BYTES).encode() + b"\n")
        os.fsync(file)
    finally:
        os.close(file)


def _map_distinct(column: pl.Series, how: Callable[[str], str]) -> pl.Series:
    """Replace every distinct text once; an empty one stays."""
    distinct = [text for text in column.unique().to_list() if text]
    if not distinct:
        return column
    return column.replace(distinct, [how(text) for text in distinct])


def _without_quotes(reason: str) -> str:
    return _QUOTED.sub("...", reason)
