"""The codec that the data room is given: values to bytes and back, without pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Codec(NamedTuple):
    """Two functions that a loader's process can be sent."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
