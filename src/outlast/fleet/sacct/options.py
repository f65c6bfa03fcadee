"""What a log of accounting does not say of itself, so that whoever reads it has to."""

from __future__ import annotations

import zoneinfo

import msgspec

from outlast.errors import UsageError

BLOCK_BYTES = 32 << 20


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a log. Raises UsageError for what cannot be."""

    zone: str = "UTC"  # of times that are written without one: that of the machine sacct ran on
    zone_said: bool = True  # else it is only assumed, which is then noted
    cluster: str = ""  # where no column says it
    delimiter: str = ""  # "": as the header shows
    columns: tuple[str, ...] = ()  # of a log without a header, in sacct's names
    taken_ns: int | None = None  # when sacct ran; None: the last moment that the log speaks of
    block_bytes: int = BLOCK_BYTES  # of text that is worked on at once

    def __post_init__(self) -> None:
        try:
            zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError) as error:
            raise UsageError(
                f"{self.zone!r} is no time zone; say one as in Europe/Berlin"
            ) from error
        if "\n" in self.delimiter or self.delimiter.isalnum():
            raise UsageError(f"{self.delimiter!r} cannot separate fields")
        if self.block_bytes < 1:
            raise UsageError("a block has at least one byte")
