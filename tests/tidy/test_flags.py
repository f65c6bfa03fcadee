"""Flags of `outlast run` are frozen: they change only together with run_flags.txt.

To accept a change on purpose: `python tests/tidy/test_flags.py > tests/tidy/run_flags.txt`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).with_name("run_flags.txt")


def surface() -> str:
    """Every flag with its spellings and default, sorted."""
    from outlast.launch.torchrun_arguments import run_parser

    flags = [
        " ".join([*sorted(action.option_strings), f"[{action.default}]"])
        for action in run_parser()._actions
        if action.option_strings
    ]
    return "\n".join(sorted(flags)) + "\n"


def test_the_flags_of_run_are_frozen() -> None:
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip(f"torchrun's own flags are frozen for torch 2.13, this is {torch.__version__}")
    assert surface() == GOLDEN.read_text()


if __name__ == "__main__":
    print(surface(), end="")
