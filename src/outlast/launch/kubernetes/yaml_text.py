"""Writer of plain YAML: block style, comments, and strings that every reader takes as strings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from outlast.errors import UsageError

# Words that YAML 1.1 or 1.2 reads as another type are quoted.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*")
_OTHER_TYPES = {"true", "false", "yes", "no", "on", "off", "y", "n", "null"}


class Commented(NamedTuple):
    """Value of a mapping with comment lines above its key."""

    comment: str
    value: object


class Block(NamedTuple):
    """Text of several lines that is shown as it is."""

    text: str


def documents(values: list[dict[str, object]]) -> str:
    """Return mappings as YAML documents. Raises UsageError for text that is no Unicode."""
    return "---\n".join("\n".join(_lines(value)) + "\n" for value in values)


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, Commented):
                yield from (f"# {line}" for line in item.comment.splitlines())
                item = item.value
            yield from _entry(f"{key}:", item)
    elif isinstance(value, list):
        for item in value:
            yield from _entry("-", item)


def _entry(head: str, value: object) -> Iterator[str]:
    """Yield `head` and a value: on one line, or below it."""
    if isinstance(value, Block):
        if all(line.isprintable() for line in value.text.splitlines()):
            yield f"{head} |"
            yield from (f"  {line}" if line else "" for line in value.text.splitlines())
        else:
            yield f"{head} {_scalar(value.text)}"
    elif isinstance(value, dict | list) and value:
        nested = _lines(value)
        if head == "-":
            yield f"- {next(nested)}"
        else:
            yield head
        yield from (f"  {line}" for line in nested)
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if value in ({}, []):
        return str(value)
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _OTHER_TYPES:
        return text
    return f'"{"".join(map(_quoted, text))}"'


def _quoted(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code < 0xE000:
        raise UsageError(f"the command has a character that is no Unicode: {character!r}")
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
