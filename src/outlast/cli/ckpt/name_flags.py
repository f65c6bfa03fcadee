"""Flags of export and import that select and rename tensors."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from outlast.checkpoint.interop.foreign_layouts import TensorNaming
from outlast.errors import UsageError


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class NameFlags:
    """Flags that may be repeated."""

    prefix: tuple[str, ...] = ()
    "Only names that begin so, and without it: `--prefix model.`"
    strip: tuple[str, ...] = ()
    "Take this off names that begin so; the others come along as they are."
    drop: tuple[str, ...] = ()
    "Leave this name out."
    add: str = ""
    "Put this in front of every name."
    rename: tuple[str, ...] = ()
    "Call one otherwise, after all that: `--rename old=new`."

    def naming(self) -> TensorNaming:
        """Return the selection and renames of tensors.

        Raises UsageError for a `--rename` that is no pair.
        """
        return TensorNaming(
            select=self.prefix,
            drop=self.drop,
            strip=(*self.prefix, *self.strip),
            add=self.add,
            rename=dict(pair("--rename", each) for each in self.rename),
        )


def pair(flag: str, text: str) -> tuple[str, str]:
    """Return two names, as in `old=new`. Raises UsageError naming the flag."""
    old, _, new = text.partition("=")
    if not old or not new:
        raise UsageError(f"{flag} {text}: say two names, as in {flag} old=new")
    return old, new
