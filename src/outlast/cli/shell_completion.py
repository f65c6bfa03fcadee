"""Shell completion of `outlast run`, whose flags argparse owns; cyclopts completes the others."""

from __future__ import annotations

import inspect
from argparse import Action
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from outlast.launch.torchrun_arguments import run_parser


def run_signature() -> Callable[..., None]:
    """Return a function with the flags of `outlast run`, to complete them and never to call."""

    def run(*_words: Any, **_flags: Any) -> None:
        """Launch a training script as with torchrun."""

    flags = [one for one in run_parser()._actions if one.option_strings and one.dest != "help"]  # noqa: SLF001 - argparse has no list of them
    script = inspect.Parameter(
        "script", inspect.Parameter.POSITIONAL_ONLY, annotation=Path, default=Path()
    )
    run.__signature__ = inspect.Signature([script, *map(_parameter, flags)])  # type: ignore[attr-defined]
    return run


def _parameter(flag: Action) -> inspect.Parameter:
    """Return the parameter of a flag, by its spellings with two hyphens and dashes."""
    names = [each for each in flag.option_strings if each.startswith("--") and "_" not in each]
    takes = bool if flag.nargs == 0 else str
    named = Parameter(name=names, negative=())
    return inspect.Parameter(
        flag.dest,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[takes, named],
        default=None,
    )
