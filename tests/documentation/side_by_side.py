"""Differences of scripts apart from indentation, as `docs/howto/port_a_script.md` shows them."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

ABOVE = "import torch"  # the docstrings above it differ as a matter of course
CONTEXT = 1  # lines


def side_by_side(plain: Path, ported: Path) -> list[str]:
    """Return the hunks of a diff, without blank lines, separated by `@@`."""
    old, new = (_code(path) for path in (plain, ported))
    matcher = difflib.SequenceMatcher(None, _bare(old), _bare(new), autojunk=False)
    shown: list[str] = []
    for group in matcher.get_grouped_opcodes(CONTEXT):
        shown.append("@@")
        for kind, a, b, c, d in group:
            if kind == "equal":
                shown += [f" {line}" for line in new[c:d]]
            else:
                shown += [f"-{line}" for line in old[a:b]] + [f"+{line}" for line in new[c:d]]
    return shown[1:]


def _code(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines[lines.index(ABOVE) :] if line.strip()]


def _bare(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


if __name__ == "__main__":
    print("\n".join(side_by_side(Path(sys.argv[1]), Path(sys.argv[2]))))
