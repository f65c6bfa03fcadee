"""Which tensors go out or come in, and what they are called there: flags of export and import."""

from __future__ import annotations

from dataclasses import dataclass

from cyclopts import Parameter

from outlast.checkpoint.foreign.naming import Naming
from outlast.errors import UsageError


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class Names:
    """Flags that may be given several times."""

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

    def naming(self) -> Naming:
        """Raises UsageError for a `--rename` that is no pair."""
        return Naming(
            select=self.prefix,
            drop=self.drop,
            strip=(*self.prefix, *self.strip),
            add=self.add,
            rename=dict(pair("--rename", each) for each in self.rename),
        )


def pair(flag: str, text: str) -> tuple[str, str]:
    """Two names, as in `old=new`. Raises UsageError naming the flag."""
    old, _, new = text.partition("=")
    if not old or not new:
        raise UsageError(f"{flag} {text}: say two names, as in {flag} old=new")
    return old, new
