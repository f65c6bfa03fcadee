"""The scripts of the catalogue, what their headers expect, and the faults that strike them.

A script's docstring says what it is a kind of. Comment lines behind it may say:

    # ranks: 3                         (default 2)
    # steps: 8                         committed steps of the whole run (default 10)
    # places: forward, vote            phases that the script reaches (default: all in PLACES)
    # refused: WORDS                   the undisturbed run must end at its start with these words
    # unmeasured: REASON               may fail: nobody has seen a run of it on a quiet machine
    # unmended: WAYS: ITEM             expected to fail (undisturbed, faults) until ITEM is mended
"""

from __future__ import annotations

import ast
import dataclasses
import os
import random
import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOMS = (
    "collectives",
    "data",
    "ddp",
    "hot",
    "loops",
    "models",
    "optimizers",
    "phases",
    "pipeline",
    "sharded",
    "state",
)
PLACES = {
    "kill": ("forward", "backward", "vote", "apply", "done", "between"),
    "stop": ("forward", "backward", "vote", "between"),
    "raise": ("forward", "backward"),
}
WAYS = ("undisturbed", "faults", *PLACES)
# Cheap and telling: these run with the suite, the others with `make scripts`.
IN_THE_SUITE = ("grad_scaler", "epochs_in_functions")

_HEADER = re.compile(r"^# (ranks|steps|places|refused|unmeasured|unmended): (.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Script:
    """One script and its header."""

    path: Path
    kind: str
    ranks: int = 2
    steps: int = 10
    places: tuple[str, ...] = tuple(dict.fromkeys(p for ps in PLACES.values() for p in ps))
    refused: str = ""
    unmeasured: str = ""
    unmended: str = ""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def room(self) -> str:
        return self.path.parent.name

    def ways(self) -> tuple[str, ...]:
        """Return the ways to run the script; a refused script has no faults."""
        return WAYS[:1] if self.refused else WAYS

    def unmended_item(self, way: str) -> str:
        """Return the item that blocks this way, or ""."""
        ways, _, item = self.unmended.partition(": ")
        whole = "faults" if way in PLACES else way
        return item if whole in ways.split(", ") else ""

    def faults(self, way: str) -> list[str]:
        """Return flags for `way`: a kill, a stop, a raise, or each of them at another step."""
        dice = random.Random(f"{self.name} {os.environ.get('SCRIPTS_SEED', '0')}")
        steps = dice.sample(range(2, self.steps), k=len(PLACES))
        flags = []
        for (kind, places), step in zip(PLACES.items(), steps, strict=True):
            place = dice.choice([place for place in places if place in self.places])
            rank = dice.randrange(self.ranks)
            if way in ("faults", kind):
                flags.append(f"--fault={kind}:rank={rank},step={step},phase={place}")
        return flags


def read_script(path: Path) -> Script:
    """Read a script's header."""
    text = path.read_text()
    kind = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    header = dict(_HEADER.findall(text))
    return Script(
        path,
        kind.removesuffix("."),
        ranks=int(header.get("ranks", Script.ranks)),
        steps=int(header.get("steps", Script.steps)),
        places=tuple(header["places"].split(", ")) if "places" in header else Script.places,
        refused=header.get("refused", ""),
        unmeasured=header.get("unmeasured", ""),
        unmended=header.get("unmended", ""),
    )


def read_catalogue() -> list[Script]:
    """Return all scripts, by folder and name."""
    paths = [path for room in ROOMS for path in sorted((FOLDER / room).glob("*.py"))]
    return [read_script(path) for path in paths]


def table(catalogue: list[Script]) -> str:
    """Return the catalogue as a Markdown table: kind, script, and outcome."""
    lines = ["| kind | script | what holds |", "|---|---|---|"]
    for script in catalogue:
        holds = f'refused: "{script.refused}"' if script.refused else "equal"
        if script.unmeasured:
            holds += " (not measured yet)"
        if script.unmended:
            holds = f"not yet ({script.unmended.partition(': ')[2]})"
        lines.append(f"| {script.kind} | `{script.room}/{script.name}` | {holds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(read_catalogue()))
