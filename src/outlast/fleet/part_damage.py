"""Damage of a lake's Parquet files: digests, and whole readings where there are none."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import polars as pl
import xxhash

PARQUET = b"PAR1"  # first and last bytes of a file


def file_digest(file: Path) -> str:
    """Return the XXH3 digest of a file, in 32 hexadecimal digits. Raises OSError."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, xxhash.xxh3_128).hexdigest()


def find_defect(file: Path, digest: str, rows: int) -> str:
    """Return the defect of a Parquet file; "" if it is complete.

    Without a `digest` (of a lake that an older version wrote), all columns are read, and `rows`
    are counted: damage that still decodes is not found.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return "no file"
        if digest:
            return "" if file_digest(file) == digest else "damaged"
        with file.open("rb") as data:
            if data.read(len(PARQUET)) != PARQUET:
                return "damaged"
        # The rows are dropped: a day is in memory at a time.
        return "" if pl.read_parquet(file, glob=False).height == rows else "damaged"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        return f"not to be read ({error.strerror or error})"
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException):
        return "damaged"
