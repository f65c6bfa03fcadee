"""The error file of a worker, written by ``torch.distributed.elastic``'s ``@record`` on failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

NAME = "error.json"
SIZE_BYTES_MAX = 1 << 20
TEXT_LENGTH_MAX = 64 << 10


class ErrorFile(NamedTuple):
    """The failure as the worker recorded it."""

    message: str
    traceback: str  # "" where the handler recorded none
    t_ns: int  # Unix time, in whole seconds as torch writes it; 0 where it is not given


def read(path: Path) -> ErrorFile | None:
    """Return the recorded failure, or None where there is none that can be read.

    The file is the worker's own and may hold anything: what is no JSON object of torch's shape, or
    larger than SIZE_BYTES_MAX, is ignored. Both of torch's shapes are known: ``message`` as an
    object (``message``, ``extraInfo``) and as a plain string.
    """
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_BYTES_MAX + 1)
        if len(data) > SIZE_BYTES_MAX:
            return None
        content = msgspec.json.decode(data)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    message = content.get("message")
    if isinstance(message, str):
        return _error_file(message, content)
    if isinstance(message, dict) and isinstance(message.get("message"), str):
        extra = message.get("extraInfo")
        return _error_file(message["message"], extra if isinstance(extra, dict) else {})
    return None


def _error_file(message: str, extra: dict[str, Any]) -> ErrorFile:
    traceback = extra.get("py_callstack")
    return ErrorFile(
        message[:TEXT_LENGTH_MAX],
        traceback[-TEXT_LENGTH_MAX:] if isinstance(traceback, str) else "",
        _unix_ns(extra.get("timestamp")),
    )


def _unix_ns(value: object) -> int:
    text = str(value)
    is_plausible = text.isascii() and text.isdecimal() and len(text) <= 12
    return int(text) * 1_000_000_000 if is_plausible else 0
