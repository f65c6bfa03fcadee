"""Cost of the proof of process groups at a run's start, beside as many collectives on plain gloo.

In turn, in processes of their own, since it happens once in a process: `prove_groups`, and two
plain ProcessGroupGloo that connect and run as many collectives of as many bytes. Processor time of
all threads. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import msgspec
from harness import load, median, spread, table, verdict

MILLISECONDS_MAX = 40.0
HEAD = """
import json, threading, time, torch, torch.distributed as dist
from outlast.worker.groups import group_proof
torch.set_num_threads(1)
"""
PROOF = """
before = time.process_time()
group_proof.prove_groups()
print(json.dumps({"all": time.process_time() - before}))
"""
STAGES = """
from outlast.worker.groups.group_registry import GroupRegistry
spent = {"connect": 0.0, "collectives": 0.0}
def stage(name, task):
    before = time.process_time()
    found = task()
    spent[name] = time.process_time() - before
    return found
both = []
stage("listen", lambda: [both.append(group_proof._registry(rank, both, 30.0)) for rank in (0, 1)])
groups = stage("connect", lambda: group_proof._on_both(both, group_proof._connect, 30.0))
stage("collectives", lambda: group_proof._on_both(groups, group_proof._run_collectives, 30.0))
stage("sever", lambda: group_proof._sever(both, groups, 30.0))
stage("drop", lambda: [each.shutdown() for each in both])
print(json.dumps(spent))
"""
# All-reduce, broadcast, reduce-scatter, broadcast, and the control group's all-reduce and two
# all-gathers, on two groups, as in the proof.
PLAIN = """
before = time.process_time()
stores = dist.HashStore(), dist.HashStore()
def rank_of(rank):
    groups = [dist.ProcessGroupGloo(store, rank, 2) for store in stores]
    one = torch.ones(4)
    for group in (groups[0], groups[1]):
        group.allreduce([one]).wait()
        group.broadcast([one], 1).wait()
        group.allgather([[torch.ones(4), torch.ones(4)]], [one]).wait()
    groups[0].broadcast([one], 0).wait()
threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in (0, 1)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"all": time.process_time() - before}))
"""


def spent_ms(code: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=True, timeout=120
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, float])
    return {name: 1e3 * seconds for name, seconds in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    ours: list[float] = []
    plain: list[float] = []
    stages: list[dict[str, float]] = []
    for _ in range(args.repeats):
        ours.append(spent_ms(PROOF)["all"])
        plain.append(spent_ms(PLAIN)["all"])
        stages.append(spent_ms(STAGES))
    proof, gloo = spread(ours), spread(plain)
    ratio = spread([one / other for one, other in zip(ours, plain, strict=True)])
    of_stages = {name: median([each[name] for each in stages]) for name in stages[0]}
    rows = [("proof", proof), ("plain gloo", gloo), ("proof / plain gloo", ratio)]
    table(
        ("processor time", "median ms", "interval"),
        [
            *((name, f"{s.median:.2f}", f"{s.low:.2f} to {s.high:.2f}") for name, s in rows),
            *((f"of it: {name}", f"{ms:.2f}", "") for name, ms in of_stages.items()),
        ],
    )
    print(f"load {load():.1f}")
    figures = {"proof_ms": proof, "plain_ms": gloo, "ratio": ratio, "stages_ms": of_stages,
               "load": load()}  # fmt: skip
    return verdict("group_start", figures, {"ms of the proof": (proof.median, MILLISECONDS_MAX)})


if __name__ == "__main__":
    sys.exit(main())
