"""Two hosts (namespaces; needs root): what a step costs more for the own state that partners keep.

The same job with and without the exchange, in turn, for some sizes of own state. The limit is the
time in which two copies of it pass the same network in one TCP connection. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from harness import HERE, load, median, table, verdict

sys.path.insert(0, str(HERE.parent))
from tests.cluster.cluster import Cluster
from tests.cluster.hosts import Hosts, missing_requirement

from outlast.errors import EXIT_DONE

KIB = 1 << 10
SIZES = {"5 KiB": (5 * KIB, 200), "256 KiB": (256 * KIB, 120), "15 MiB": (15 << 20, 40)}
COPIES = 2  # before:n and after:n+1
PORT, STREAM_BYTES = 29555, 512 << 20
RECEIVE = """
import socket
with socket.create_server(("", {port})) as listener:
    print("up", flush=True)
    with listener.accept()[0] as stream:
        while stream.recv(1 << 20):
            pass
        stream.send(b".")
"""
SEND = """
import socket, time
data = bytes(1 << 20)
with socket.create_connection(("{host}", {port})) as stream:
    began = time.monotonic()
    for _ in range({size} >> 20):
        stream.sendall(data)
    stream.shutdown(socket.SHUT_WR)
    stream.recv(1)
    print({size} / (time.monotonic() - began))
"""


class StepCost(NamedTuple):
    """Median milliseconds of a step with the exchange, without it, and the limit."""

    with_ms: float
    without_ms: float
    limit_ms: float


def bytes_per_s(hosts: Hosts) -> float:
    """Return the rate of one TCP connection between the hosts."""
    receiver = hosts.command("n2", sys.executable, "-c", RECEIVE.format(port=PORT))
    with subprocess.Popen(receiver, stdout=subprocess.PIPE, text=True) as end:
        assert end.stdout is not None and end.stdout.readline() == "up\n"
        words = SEND.format(host=hosts.address("n2"), port=PORT, size=STREAM_BYTES)
        return float(hosts.run("n1", sys.executable, "-c", words))


def step_ms(folder: Path, hosts: Hosts, size: int, steps: int, *words: str) -> float:
    """Return the median step of both ranks of a run on two hosts, in milliseconds."""
    folder.mkdir()
    cluster = Cluster(folder, hosts)
    job = HERE / "partner_job.py"
    cluster.start("2", 1, job=(str(steps), str(size), *words), script=job)
    if (codes := set(cluster.codes().values())) != {EXIT_DONE}:
        raise SystemExit(f"exit codes {codes}; see {folder}")
    found = [json.loads(path.read_text()) for path in sorted(cluster.out.iterdir())]
    return 1e3 * median([seconds for times in found for seconds in times])


def measure(name: str) -> StepCost:
    """Measure one size, with the exchange and without it."""
    size, steps = SIZES[name]
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as where:
        folder = Path(where)
        with Hosts(folder, 2) as hosts:
            limit_ms = 1e3 * COPIES * size / bytes_per_s(hosts)
            with_ms = step_ms(folder / "with", hosts, size, steps)
            return StepCost(
                with_ms, step_ms(folder / "alone", hosts, size, steps, "alone"), limit_ms
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if missing := missing_requirement():
        raise SystemExit(f"partners: {missing}")
    costs: dict[str, list[StepCost]] = {name: [] for name in SIZES}
    for turn in range(args.repeats):
        for name, found in costs.items():
            found.append(measure(name))
            print(f"{turn + 1}/{args.repeats} {name}: {found[-1]}", file=sys.stderr)
    middle = {
        name: StepCost(*(median(list(each)) for each in zip(*found, strict=True)))
        for name, found in costs.items()
    }
    table(
        ("own state", "step with, ms", "without", "exchange", "limit"),
        [
            (
                name,
                f"{cost.with_ms:.2f}",
                f"{cost.without_ms:.2f}",
                f"{cost.with_ms - cost.without_ms:.2f}",
                f"{cost.limit_ms:.2f}",
            )
            for name, cost in middle.items()
        ],
    )
    small = middle["5 KiB"]
    bars = {"exchange of 5 KiB a step (ms)": (small.with_ms - small.without_ms, 2.0)}
    return verdict("partners", {"load": load(), "costs": costs}, bars)


if __name__ == "__main__":
    sys.exit(main())
