"""Random bit flips in a real job of four ranks: found, named, transient told from lasting.

A run has one flip of each of three ranks, so that each is the first one of its device within the
hour. A lasting one comes again: in the redo of its step, or, in parameters and optimizer state,
some steps after the rank was replaced. A flip before the reduction reaches all replicas alike, and
only a replay on another rank finds it (`--replay-every`): a lasting one flips in each backward from
its step on, in one process. The share found is printed, and has no bar. See docs/sentinels.md.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flip_job import WIDTHS
from harness import OUTLAST, job, table
from workload import WORLD

from outlast import events
from outlast.telemetry.event_store import read_events

EVERY = 10  # --audit-every
A_RUN = WORLD - 1  # flips of a run
FIRST_STEP, APART = 4, 5  # of flips, in steps
AGAIN_AFTER = 3  # steps until a lasting flip of state comes again
LASTING_SHARE = 0.3
PLACES = ("gradient", "parameter", "optimizer")
BEFORE = "before"  # the reduction
REPLAY_EVERY = 3  # --replay-every, of runs with flips before the reduction
_STEP = re.compile(r"\bstep (\d+)")
_LAYERS = (0, 2, 4)  # of the nn.Sequential in flip_job


class Flip(NamedTuple):
    """One wrong bit of one rank. `step`: that computes or commits it."""

    place: str
    rank: int
    step: int
    tensor: str
    bit: int
    is_lasting: bool

    def faults(self) -> list[str]:
        """Return the words of --fault."""
        where = {"gradient": "reduced", BEFORE: "backward"}.get(self.place, "committed")
        text = f"flip:rank={self.rank},phase={where},tensor={self.tensor},bit={self.bit}"
        if self.place == "gradient":
            return [f"{text},step={self.step},times={1 + self.is_lasting}"]
        if self.place == BEFORE:
            return [f"{text},step={self.step}{',cause=device' * self.is_lasting}"]
        steps = (self.step, self.step + AGAIN_AFTER) if self.is_lasting else (self.step,)
        return [f"{text},step={step}" for step in steps]


class Found(NamedTuple):
    """What a run found of one flip. `steps`: until then; -1: never."""

    flip: Flip
    steps: int
    is_right_rank: bool
    is_lasting: bool
    is_end_equal: bool  # the run's last loss is the undisturbed run's


def draw(dice: random.Random, places: Sequence[str]) -> list[Flip]:
    """Draw the flips of a run: ranks, tensors by their sizes, bits."""
    shapes = {}
    for layer, (before, after) in zip(_LAYERS, itertools.pairwise(WIDTHS), strict=True):
        shapes[f"model.module.{layer}.weight"] = before * after
        shapes[f"model.module.{layer}.bias"] = after
    flips = []
    for number, rank in enumerate(dice.sample(range(WORLD), A_RUN)):
        name = dice.choices(list(shapes), list(shapes.values()))[0]
        place = dice.choice(places)
        moment = dice.choice(("exp_avg", "exp_avg_sq"))
        tensor = f"optimizer.state.{name}.{moment}" if place == "optimizer" else name
        flips.append(
            Flip(
                place,
                rank,
                FIRST_STEP + dice.randrange(2) + APART * 2 * number,
                tensor,
                dice.randrange(32 * shapes[name]),
                dice.random() < (LASTING_SHARE if place in PLACES else 0.5),
            )
        )
    return flips


def play(flips: Sequence[Flip], replay_every: int = 0) -> tuple[list[events.AnyEvent], float]:
    """Run the job with these flips; return its events and its last loss."""
    steps = FIRST_STEP + 2 * APART * A_RUN + EVERY
    faults = [f"--fault={text}" for flip in flips for text in flip.faults()]
    flags = ("--spares=1", f"--audit-every={EVERY}", f"--replay-every={replay_every}", *faults)
    with job((*OUTLAST, *flags), "flip_job.py", "--steps", steps) as done:
        story = read_events(done.folder / "run")
    losses = {
        each.step: each.values["loss"]
        for each in story
        if isinstance(each, events.Metrics) and each.seat == 0
    }
    return story, losses[steps]


def judge(flips: Sequence[Flip], story: Sequence[events.AnyEvent], *, equal: bool) -> list[Found]:
    """Compare the findings of a run with its flips."""
    findings = [e for e in story if isinstance(e, events.Warned) and e.check == "corruption"]
    ranks = {flip.rank for flip in flips}
    named = {int(found.device.removeprefix("rank ")) for found in findings}
    results = []
    for flip in flips:
        mine = [found for found in findings if found.device == f"rank {flip.rank}"]
        steps = -1
        if mine:  # a gradient's finding names its step, one of state the first step that uses it
            at = _STEP.search(mine[0].detail)
            step = int(at[1]) if at else 0
            steps = step - flip.step - (flip.place not in ("gradient", BEFORE))
        is_lasting = any(found.code == "lasting" for found in mine)
        results.append(Found(flip, steps, bool(mine) and named <= ranks, is_lasting, equal))
    return results


def measure(count: int, seed: int, results: Path | None) -> dict[str, list[Found]]:
    """Play at least `count` flips, and a tenth as many before the reduction."""
    dice = random.Random(seed)
    _, expected = play([])
    found: dict[str, list[Found]] = {"after": [], BEFORE: []}
    for name, wanted, places in (("after", count, PLACES), (BEFORE, count // 10, (BEFORE,))):
        while len(found[name]) < wanted:
            flips = draw(dice, places)
            story, loss = play(flips, REPLAY_EVERY if name == BEFORE else 0)
            now = judge(flips, story, equal=loss == expected)
            found[name] += now
            if results is not None:
                with results.open("a") as file:
                    file.writelines(json.dumps(each) + "\n" for each in now)
    return found


def read(results: Path) -> dict[str, list[Found]]:
    """Read what several slices have found."""
    found: dict[str, list[Found]] = {"after": [], BEFORE: []}
    for line in results.read_text().splitlines():
        flip, *others = json.loads(line)
        each = Found(Flip(*flip), *others)
        found[BEFORE if each.flip.place == BEFORE else "after"].append(each)
    return found


def report(
    found: dict[str, list[Found]],
) -> tuple[dict[str, object], dict[str, tuple[float, float]]]:
    """Print the shares; return figures and bars (figure, limit)."""
    rows = []
    for place in (*PLACES, BEFORE):
        each = [one for one in found["after"] + found[BEFORE] if one.flip.place == place]
        if not each:
            continue
        seen = [one for one in each if 0 <= one.steps <= EVERY]
        told = [one for one in each if one.is_lasting == one.flip.is_lasting]
        delays = Counter(one.steps for one in seen)
        rows.append(
            (
                place, str(len(each)), f"{len(seen)}", f"{sum(one.is_right_rank for one in seen)}",
                f"{len(told)}", f"{sum(one.is_end_equal for one in each)}",
                ", ".join(f"{steps}: {times}" for steps, times in sorted(delays.items())),
            )
        )  # fmt: skip
    table(("place", "flips", f"within {EVERY}", "right rank", "kind", "same end", "steps"), rows)
    after = found["after"]
    missed = [one for one in after if not 0 <= one.steps <= EVERY]
    wrong = [one for one in after if not one.is_right_rank]
    untold = [one for one in after if one.is_lasting != one.flip.is_lasting]
    for one in (*missed, *wrong, *untold):
        print(one)
    total = max(1, len(after))
    before = found[BEFORE]
    lasting = [one for one in before if one.flip.is_lasting]
    figures: dict[str, object] = {
        "flips": len(after),
        "missed": len(missed),
        "wrong_rank": len(wrong),
        "untold": len(untold),
        "before_reduction": len(before),
        "before_reduction_found": sum(one.steps >= 0 for one in before),
        "before_reduction_lasting": len(lasting),
        "before_reduction_lasting_found": sum(one.steps >= 0 for one in lasting),
        "before_reduction_wrong_rank": sum(
            one.steps >= 0 and not one.is_right_rank for one in before
        ),
    }
    bars = {
        "flips not found within K steps, share": (len(missed) / total, 0.0),
        "flips with the wrong rank, share": (len(wrong) / total, 0.0),
        "transient and lasting confused, share": (len(untold) / total, 0.05),
    }
    return figures, bars
