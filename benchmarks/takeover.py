"""Four hosts (namespaces; needs root): what the death of the controller costs.

The launcher of the controller's node is killed, on a node without ranks and on one with a rank, and
such a node loses power; the lease is 2 s. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from harness import HERE, load, median, table, verdict

sys.path.insert(0, str(HERE.parent))
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import Hosts, missing_requirement
from tests.cluster.takeover_strikes import (
    kill_launcher,
    move_control_to_a_spare_node,
    owner_of,
    power_off,
)

from outlast.events import AnyEvent, Decided, Note, PhaseDone

LEASE_S, STEPS, STEP = 2.0, 400, 40
DECISION_MAX_S = 5.0


class Death(NamedTuple):
    """End of a controller: what comes before it, what it is, and on which host."""

    strike: Callable[[Cluster, str], None]
    prepare: Callable[[Cluster], str] = lambda _cluster: "n1"


DEATHS = {
    "killed, no ranks": Death(kill_launcher, move_control_to_a_spare_node),
    "killed, a rank": Death(kill_launcher),
    "power off, a rank": Death(power_off),
}


class Cost(NamedTuple):
    """Seconds from the death to the new term, its first decision, and the next step of all ranks;
    the longest time without a step beyond a usual one."""

    term_s: float
    decision_s: float
    commit_s: float
    standstill_s: float


def run(death: Death) -> Cost:
    """Run a job on hosts through the death of its controller."""
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        with Hosts(folder, 4) as hosts:
            cluster = Cluster(folder, hosts)
            hold = folder / "hold"
            hold.touch()
            flags = (f"--limit=lease_s={LEASE_S:g}", "--checkpoint-every=100")
            cluster.start("2:4", 1, *flags, job=(str(STEPS), "ddp", str(hold)))
            cluster.wait_for_event(
                lambda one: isinstance(one, PhaseDone) and one.step >= STEP, f"step {STEP}"
            )
            host = death.prepare(cluster)
            terms = sum(map(is_takeover, cluster.events()))
            begin_ns = time.time_ns()
            death.strike(cluster, host)
            owner_of(cluster, terms + 2)
            cluster.wait_for_event(lambda one: is_decision(one, begin_ns), "a decision")
            count = sum(isinstance(one, PhaseDone) for one in cluster.events())
            cluster.wait_for_event(lambda one: isinstance(one, PhaseDone), "steps", count + 40)
            found = cluster.events()
            cluster.close()
    return _cost(found, begin_ns)


def is_takeover(event: AnyEvent) -> bool:
    """Return whether a node says that it takes over."""
    return isinstance(event, Note) and "takes over as controller" in event.text


def is_decision(event: AnyEvent, since_ns: int) -> bool:
    """Return whether a controller has decided, or adopted the open generation."""
    adopted = isinstance(event, Note) and "train on in generation" in event.text
    return event.t_ns > since_ns and (adopted or isinstance(event, Decided))


def _cost(found: list[AnyEvent], begin_ns: int) -> Cost:
    term_ns = min(one.t_ns for one in found if is_takeover(one) and one.t_ns > begin_ns)
    decision_ns = min(one.t_ns for one in found if is_decision(one, begin_ns))
    ends: dict[int, dict[int, int]] = {}  # step -> rank -> when it was committed
    for one in found:
        if isinstance(one, PhaseDone) and one.kind == "step":
            ends.setdefault(one.step, {})[one.seat] = one.t_ns
    times = [max(ranks.values()) for _, ranks in sorted(ends.items()) if len(ranks) == 2]
    usual_ns = median([float(after - before) for before, after in pairwise(times)])
    gaps = [after - before for before, after in pairwise(times) if after > begin_ns]
    commit_ns = min(each for each in times if each > decision_ns)
    return Cost(
        (term_ns - begin_ns) / 1e9,
        (decision_ns - begin_ns) / 1e9,
        (commit_ns - begin_ns) / 1e9,
        max(0.0, max(gaps) - usual_ns) / 1e9,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if missing := missing_requirement():
        raise SystemExit(f"hosts: {missing}")
    costs: dict[str, list[Cost]] = {name: [] for name in DEATHS}
    for turn in range(args.repeats):
        for name, death in DEATHS.items():
            costs[name].append(run(death))
            print(f"{turn + 1}/{args.repeats} {name}: {costs[name][-1]}", file=sys.stderr)
    medians = {
        name: Cost(*(median(list(each)) for each in zip(*found, strict=True)))
        for name, found in costs.items()
    }
    table(
        ("death of the controller", "new term", "decision", "next step", "standstill"),
        [(name, *(f"{seconds:.2f} s" for seconds in cost)) for name, cost in medians.items()],
    )
    bars = {
        f"{name}: decision (s)": (cost.decision_s, DECISION_MAX_S) for name, cost in medians.items()
    }
    bars["killed, no ranks: standstill (s)"] = (medians["killed, no ranks"].standstill_s, 0.2)
    return verdict("takeover", {"load": load(), "lease_s": LEASE_S, "costs": costs}, bars)


if __name__ == "__main__":
    sys.exit(main())
