"""One way to write the address of a device, whatever its source makes of it."""

from __future__ import annotations

import re
from functools import cache, lru_cache


@cache
def _address() -> re.Pattern[str]:
    parts = r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?"
    return re.compile(parts, re.IGNORECASE)


@lru_cache(4096)  # a storm is of few devices
def device(text: str) -> str:
    """A PCI address as 0000:3b:00.0, from PCI:0000:3b:00, 00000000:3B:00.0 or 3b:00.0; anything
    else as it is."""
    found = _address().fullmatch(text.strip())
    if not found:
        return text.strip()
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus.lower()}:{slot.lower()}.{function or '0'}"
