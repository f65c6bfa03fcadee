"""Random fault schedules on real processes; the bits must stay equal.

python tests/soak/fault_schedules.py --runs 30            # seeds 0 to 29
python tests/soak/fault_schedules.py --first 17 --runs 1  # one seed again

Not a test that `make test` runs: each schedule trains for half a minute.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from outlast.cli.demo import compare, example
from outlast.config import child_environment

STEPS, WORLD, EVALUATE_EVERY = 24, 4, 6
DEADLINE_S = 240.0
PLACES = {
    "kill": ("forward", "backward", "vote", "apply", "done", "between", "eval", "heal"),
    "stop": ("forward", "backward", "vote"),
    "raise": ("forward", "backward"),
    "reset": ("forward", "backward"),
    "slow": ("forward",),
}


def schedule(seed: int) -> list[str]:
    """Return the flags of one run: spares, checkpoints, and one to four faults."""
    dice = random.Random(seed)
    flags = [f"--spares={dice.randrange(3)}", f"--checkpoint-every={dice.choice((0, 7))}"]
    struck = None  # a rank that is healing can only be hit where something has struck already
    for _ in range(dice.randint(1, 4)):
        kind = dice.choices(list(PLACES), weights=(5, 2, 2, 2, 1))[0]
        where, rank = dice.choice(PLACES[kind]), dice.randrange(WORLD)
        step = dice.randint(2, STEPS - 1)
        if where == "eval":
            step = EVALUATE_EVERY * dice.randint(1, STEPS // EVALUATE_EVERY - 1)
        elif where == "heal" and struck is None:
            where = "forward"
        elif where == "heal":
            step, rank = struck[0], (struck[1] + dice.randint(1, WORLD - 1)) % WORLD
        struck = struck or (step, rank)
        patience = ",for=1" if kind == "slow" else ""
        flags += ["--fault", f"{kind}:rank={rank},step={step},phase={where}{patience}"]
    return flags


def train(run_dir: Path, flags: list[str]) -> int:
    """Run the example once; return its exit code, or -1 after the deadline."""
    command = [
        *(sys.executable, "-m", "outlast", "run", "--plain", f"--nproc-per-node={WORLD}"),
        *(f"--run-dir={run_dir}", *flags, str(example()), f"--steps={STEPS}"),
        *(f"--evaluate-every={EVALUATE_EVERY}", "--width=64", "--layers=2"),
    ]
    with run_dir.with_suffix(".out").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=child_environment({})
        )
        try:
            return process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            return -1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="outlast-soak-"))
    twin = folder / "undisturbed"
    if train(twin, []):
        print(f"the undisturbed run failed: {twin}.out")
        return 1
    bad = 0
    for seed in range(args.first, args.first + args.runs):
        flags, run_dir, began = schedule(seed), folder / f"seed-{seed}", time.monotonic()
        asked = flags.count("--fault")
        code = train(run_dir, flags)
        found = compare(run_dir, twin, faults=asked) if code == 0 else None
        good = found is not None and found.losses_equal and found.digests_equal
        bad += not good
        said = "equal" if good else f"exit code {code}" if code else "DIFFERS"
        struck = f"{found.faults_struck}/{asked} struck" if found else f"{asked} asked"
        print(f"seed {seed}: {said}, {struck}, {time.monotonic() - began:.1f} s", flush=True)
        if good:
            shutil.rmtree(run_dir)
        else:
            print(f"  {' '.join(flags)}\n  kept: {run_dir} and {run_dir}.out", flush=True)
    print(f"{args.runs - bad} of {args.runs} schedules ended with the same bits")
    if not bad:
        shutil.rmtree(folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
