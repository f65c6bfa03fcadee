"""Three hosts (namespaces; needs root): what failures of hosts and networks cost.

A worker is killed on the controller's host and on another one, in turn; a host loses power; a host
is silent for a second. Costs last from the failure until all ranks have committed the interrupted
step. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NamedTuple

from harness import HERE, load, median, table, verdict

sys.path.insert(0, str(HERE.parent))
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import Hosts, missing_requirement

from outlast.errors import EXIT_DONE
from outlast.events import PhaseDone
from outlast.telemetry.history.incident_course import Incident
from outlast.telemetry.history.phase_blocks import incidents
from outlast.telemetry.history.run_history import read_history

LEASE_S, STEPS, STEP = 3.0, 100, 40
SILENCE_S = 1.0


class Failure(NamedTuple):
    """A failure: flags of the run, or what is done to its hosts when a step is committed."""

    nodes: str
    flags: tuple[str, ...] = ()
    strike: Callable[[Hosts], None] | None = None


def be_silent(hosts: Hosts) -> None:
    hosts.set_silent("n2", silent=True)
    Event().wait(SILENCE_S)
    hosts.set_silent("n2", silent=False)


FAILURES = {
    "kill, controller's host": Failure("2", (f"--fault=kill:rank=0,step={STEP}",)),
    "kill, other host": Failure("2", (f"--fault=kill:rank=1,step={STEP}",)),
    "power loss": Failure("2:3", strike=lambda hosts: hosts.power_off("n2")),
    "silent for 1 s": Failure("2:3", strike=be_silent),
}


class Cost(NamedTuple):
    """Seconds until the interrupted step was committed, steps redone, and ranks replaced."""

    seconds: float
    lost_steps: int
    replaced: int


def run(failure: Failure) -> Cost:
    """Run a job on hosts through one failure."""
    count = int(failure.nodes[-1])
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        folder = Path(name)
        with Hosts(folder, count) as hosts:
            cluster = Cluster(folder, hosts)
            flags = (f"--limit=lease_s={LEASE_S:g}", "--checkpoint-every=10", *failure.flags)
            cluster.start(failure.nodes, 1, *flags, job=(str(STEPS),))
            begin_ns = 0
            if failure.strike:
                cluster.wait_for_event(
                    lambda one: isinstance(one, PhaseDone) and one.step >= STEP, f"step {STEP}"
                )
                begin_ns = time.time_ns()
                failure.strike(hosts)
            codes = set(cluster.codes().values())
            if codes != {EXIT_DONE}:
                raise SystemExit(f"exit codes {codes}")
            return _cost(incidents(read_history(cluster.run_dir)), begin_ns)


def _cost(found: list[Incident], begin_ns: int) -> Cost:
    if not found:
        return Cost(0.0, 0, 0)
    end_ns = max(one.t_ns + int(one.total_ms * 1e6) for one in found)
    return Cost(
        (end_ns - (begin_ns or found[0].t_ns)) / 1e9,
        sum(one.committed_steps_lost for one in found),
        sum(len(one.replaced) for one in found),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if missing := missing_requirement():
        raise SystemExit(f"hosts: {missing}")
    costs: dict[str, list[Cost]] = {name: [] for name in FAILURES}
    for turn in range(args.repeats):
        for name, failure in FAILURES.items():
            costs[name].append(run(failure))
            print(f"{turn + 1}/{args.repeats} {name}: {costs[name][-1]}", file=sys.stderr)
    seconds = {name: median([cost.seconds for cost in found]) for name, found in costs.items()}
    table(
        ("failure", "seconds", "steps redone", "ranks replaced"),
        [
            (name, f"{seconds[name]:.2f}", f"{worst[1]}", f"{worst[2]}")
            for name, found in costs.items()
            for worst in [Cost(*map(max, zip(*found, strict=True)))]
        ],
    )
    local, remote, power, _ = seconds.values()
    replaced = max(cost.replaced for cost in costs["silent for 1 s"])
    bars = {
        "kill on another host, beyond a local one (s)": (remote - local, 0.1),
        "power loss until the next commit (s)": (power, LEASE_S + 2.0),
        "ranks replaced by a silence of 1 s": (float(replaced), 0.0),
    }
    return verdict("hosts", {"load": load(), "lease_s": LEASE_S, "costs": costs}, bars)


if __name__ == "__main__":
    sys.exit(main())
