"""Files from outside, opened so that none of them takes for ever, or all memory."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from outlast.errors import SourceError, UsageError

GZIP = b"\x1f\x8b"
UNPACKED_RATIO = 200  # accounting is packed 10 to 40 times; a bomb 1000 times
UNPACKED_BYTES = 128 << 20  # what any file may unpack to
HEAD_BYTES, NULS_LEAST = 4096, 4  # one byte of so many is zero in no log in UTF-8
LINE_CHARS_MAX = 4 << 20
_OTHERS = {  # what a file begins with that nothing here reads
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: unpack it first",
    b"BZh": "is compressed with bzip2: unpack it first",
    b"\xfd7zXZ": "is compressed with xz: unpack it first",
    b"PK\x03\x04": "is an archive: unpack it first",
    b"PAR1": "is a Parquet file, and not text: write it as CSV first",
    b"\xff\xfe": "is UTF-16, as PowerShell writes it: convert it to UTF-8 first",
    b"\xfe\xff": "is UTF-16: convert it to UTF-8 first",
}


def refuse_strange(path: Path) -> None:
    """Raises UsageError for what is no file: a pipe would be waited for, a device never ends."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; nothing was read") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{path} is a directory, not a file; nothing was read")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"{path} is no file, but a pipe, a device or the like: write it to a file first;"
            " nothing was read"
        )


def unpacked(path: Path) -> BinaryIO:
    """Its bytes, gzip undone. Raises OSError; reading does so for what is damaged, and SourceError
    for what unpacks to far more than logs do."""
    file = path.open("rb")
    if file.peek(2)[:2] != GZIP:
        return file
    file.close()
    return cast(BinaryIO, _Unpacked(path))


def refuse_others(path: Path, head: bytes) -> None:
    """Raises SourceError for a file that begins as what has to be unpacked or converted first."""
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise SourceError(f"{path} {what}; nothing was read")
    if head[:HEAD_BYTES].count(0) * NULS_LEAST > len(head[:HEAD_BYTES]):
        raise SourceError(
            f"{path} has zero bytes as UTF-16 has: convert it to UTF-8 first; nothing was read"
        )


def as_text(path: Path, newline: str | None = None) -> TextIO:
    """Its characters, gzip undone; what is no UTF-8 is replaced. Raises as `unpacked` does."""
    return TextIOWrapper(unpacked(path), "utf-8-sig", "replace", newline)


def whole(path: Path, bytes_max: int, hint: str) -> bytes:
    """All its bytes, gzip undone. Raises SourceError for what has more than `bytes_max`, with a
    `hint` of what to do then, and for what cannot be read."""
    try:
        with unpacked(path) as file:
            data = file.read(bytes_max + 1)
    except (OSError, EOFError) as error:
        raise unreadable(path, error) from error
    if len(data) > bytes_max:
        raise SourceError(f"{path} has over {bytes_max >> 20:,} MiB, and is read whole: {hint}")
    return data.removeprefix(b"\xef\xbb\xbf")


def unreadable(path: Path, error: Exception) -> SourceError:
    said = error.strerror if isinstance(error, OSError) else None
    return SourceError(f"{path} cannot be read to its end: {said or error}; nothing was changed")


def lines(file: TextIO) -> Iterator[str]:
    """Of a text; what a line has beyond LINE_CHARS_MAX is left out."""
    while line := file.readline(LINE_CHARS_MAX):
        rest = line
        while len(rest) == LINE_CHARS_MAX and not rest.endswith("\n"):
            rest = file.readline(LINE_CHARS_MAX)
        yield line


class _Unpacked(gzip.GzipFile):
    """Bounded by what was packed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path = path
        self._most = max(UNPACKED_BYTES, UNPACKED_RATIO * path.stat().st_size)

    def read(self, size: int | None = -1) -> bytes:
        return self._bounded(super().read, size)

    def read1(self, size: int = -1) -> bytes:
        return self._bounded(super().read1, size)

    def _bounded(self, read: Callable[[int], bytes], size: int | None) -> bytes:
        try:
            data = read(self._most + 1 if size is None or size < 0 else size)
        except zlib.error as error:
            raise gzip.BadGzipFile(f"damaged: {error}") from error
        if self.tell() > self._most:
            raise SourceError(
                f"{self._path} unpacks to over {UNPACKED_RATIO} times its size, as no log does;"
                " nothing was read. If it is one, unpack it first"
            )
        return data
