"""Host lists as other schedulers than Slurm write them: PBS, LSF, and lists of plain names.

| scheduler | writes | means |
|---|---|---|
| PBS | `n1/0*8+n2/0*8`, `n1/0-7+n2/0-7`, `(n1:ncpus=8)+(n2:ncpus=8)` | n1,n2 |
| LSF | `8*n1:8*n2`, `n1:n1:n2` | n1,n2 |
| counts behind names | `n1:8,n2:8` | n1,n2 |
| a name for each slot | `n1,n1,n2` | n1,n2 |
"""

from __future__ import annotations

import re

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SLOTS = r"\d+(?:-\d+)?"
_PBS = re.compile(
    rf"({_NAME})/{_SLOTS}(?:[*,]{_SLOTS})*|\(({_NAME}):[^()+]*\)|({_NAME}):\w+=[^()+]*"
)
_LSF = re.compile(rf"(?:\d+\*)?({_NAME})")
_COUNTED = re.compile(rf"({_NAME}):\d+")
_FOREIGN = re.compile(r"[*+'\"{}()=]")


def as_slurm(text: str) -> str | None:
    """Return a list as Slurm writes it, each host once; None for a text that no scheduler has."""
    if "[" in text:
        return None if _FOREIGN.search(text) else text
    for separator, shape in (("+", _PBS), (",", _COUNTED), (":", _LSF)):
        found = [shape.fullmatch(part) for part in text.split(separator)]
        if all(found):
            return _once([next(filter(None, one.groups())) for one in found if one])
    if _FOREIGN.search(text):
        return None
    return _once(text.split(","))


def _once(names: list[str]) -> str:
    return ",".join(dict.fromkeys(names))
