"""Files from outside, opened so that none of them takes for ever, or all memory."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from outlast.errors import SourceError, UsageError

GZIP = b"\x1f\x8b"
UNPACKED_RATIO = 200  # accounting is packed 10 to 40 times; a bomb 1000 times
UNPACKED_BYTES = 128 << 20  # what any file may unpack to
LINE_CHARS_MAX = 4 << 20


def refuse_strange(path: Path) -> None:
    """Raises UsageError for what is no file: a pipe would be waited for, a device never ends."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; nothing was read") from error
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
        try:
            data = super().read(self._most + 1 if size is None or size < 0 else size)
        except zlib.error as error:
            raise gzip.BadGzipFile(f"damaged: {error}") from error
        if self.tell() > self._most:
            raise SourceError(
                f"{self._path} unpacks to over {UNPACKED_RATIO} times its size, as no log does;"
                " nothing was read. If it is one, unpack it first"
            )
        return data
