"""`python -m outlast.testing.soak --seeds N [--first K]`: many simulated runs.

A failing seed is played again with fewer faults, as long as it fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from outlast.testing.absent_ranks.shrink_plans import draw_shrink_plan
from outlast.testing.fault_plan import FaultPlan, draw_join_plan, draw_plan, draw_takeover_plan
from outlast.testing.run_invariants import SimFailure
from outlast.testing.sentinels.undisturbed_plans import draw_undisturbed_plan
from outlast.testing.simulated_cluster import SimCluster

_EVERY_S = 5.0


def play(seed: int, plan: FaultPlan) -> SimFailure | None:
    """Play one plan; return its failure, or None."""
    try:
        SimCluster(seed, plan).run()
    except SimFailure as failure:
        return failure
    return None


def shrink(seed: int, plan: FaultPlan, failure: SimFailure) -> tuple[FaultPlan, SimFailure]:
    """Return a plan without faults that its failure does not need, and how that one fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for field in ("timed", "strikes", "flips"):
            faults = getattr(plan, field)
            for index in range(len(faults)):
                fewer = plan._replace(**{field: faults[:index] + faults[index + 1 :]})
                if (found := play(seed, fewer)) is not None:
                    plan, failure, is_smaller = fewer, found, True
                    break
    return plan, failure


def main(argv: list[str] | None = None) -> int:
    """Play seeds one after another; return 1 at the first failure, after printing its story."""
    parser = argparse.ArgumentParser(prog="python -m outlast.testing.soak", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default %(default)s)")
    parser.add_argument(
        "--takeovers",
        action="store_true",
        help="several hosts, whose controllers die, stop or are cut off",
    )
    parser.add_argument("--joins", action="store_true", help="the same, and hosts join the run")
    parser.add_argument(
        "--shrinks", action="store_true", help="runs that go on with fewer ranks, on scarce hosts"
    )
    parser.add_argument(
        "--undisturbed", action="store_true", help="nothing fails, and no sentinel may act"
    )
    arguments = parser.parse_args(argv)
    draw = draw_takeover_plan if arguments.takeovers else draw_plan
    draw = draw_join_plan if arguments.joins else draw
    draw = draw_shrink_plan if arguments.shrinks else draw
    draw = draw_undisturbed_plan if arguments.undisturbed else draw
    outcomes: Counter[str] = Counter()
    started_s = said_s = time.monotonic()
    turns = struck = shrinks = returns = restores = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        plan = draw(seed)
        try:
            outcome = SimCluster(seed, plan).run()
        except SimFailure as failure:
            smaller, found = shrink(seed, plan, failure)
            kind = " --joins" * arguments.joins or " --takeovers" * arguments.takeovers
            kind = " --shrinks" if arguments.shrinks else kind
            kind = " --undisturbed" if arguments.undisturbed else kind
            again = f"--seeds 1 --first {seed}{kind}"
            sys.stdout.write(
                f"{found}\n\nseed {seed} failed: {str(failure).splitlines()[0]}\nagain with:"
                f" python -m outlast.testing.soak {again}\nthe story is of a smaller plan:"
                f" outlast.testing.SimCluster({seed}, {smaller}).run()\n"
            )
            return 1
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        outcomes[outcome.outcome] += 1
        turns += outcome.turns
        struck += outcome.struck
        shrinks += outcome.shrinks
        returns += outcome.returns
        restores += outcome.restores
        now_s = time.monotonic()
        if now_s - said_s > _EVERY_S:
            said_s = now_s
            sys.stdout.write(f"{sum(outcomes.values())} of {arguments.seeds} seeds\n")
            sys.stdout.flush()
    ends = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    sys.stdout.write(
        f"{arguments.seeds} seeds from {arguments.first} held in"
        f" {time.monotonic() - started_s:.1f} s: {ends}; {struck} faults, {turns} turns"
    )
    if arguments.shrinks:
        sys.stdout.write(
            f"; {shrinks} times ranks have left, {returns} have come back, and {restores} by a"
            " restart from a checkpoint without them"
        )
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
