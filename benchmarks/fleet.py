"""How long do analyses of a cluster take, from its logs to the page?

A month of RSC-1 and `--days` of both RSC-1 and RSC-2 (334 are the eleven months of Kokolis et al.:
4 million jobs) are made, read into lakes, and reported, each by its own process, as people would.
`fleet_parse.py` has the reading beside pandas, `fleet_truth.py` whether the figures are right. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness import median, table, verdict

SHAPES = ("rsc1", "rsc2")
MONTH_DAYS = 30
MONTH_S, ALL_S, ALL_GB = 3.0, 10.0, 6.0
FLAT = 1.5  # times the memory for some ten times the data
MAPPED = ("health.jsonl", "outages.csv", "nodes.csv", "repairs.csv", "checks.csv")


class Cost(NamedTuple):
    """Of one command in a process of its own."""

    wall_s: float
    cpu_s: float
    peak_gb: float


def outlast(*words: str) -> Cost:
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "outlast", "fleet", *words], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"outlast fleet {' '.join(words)}: exit code {process.returncode}")
    wall_s = time.perf_counter() - began_s
    return Cost(wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6)


def read(lake: Path, logs: Path) -> Cost:
    """Of reading the accounting; the other logs are small."""
    cost = outlast("ingest", str(lake), str(logs / "sacct.txt"))
    for name in MAPPED:
        mapping = (logs / name).with_suffix(".toml")
        outlast("ingest", str(lake), str(logs / name), "--mapping", str(mapping))
    return cost


def jobs_in(lake: Path) -> int:
    found = json.loads((lake / "lake.json").read_text())
    return sum(part["rows"] for part in found["parts"] if part["kind"] == "jobs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=334)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        month, whole = Path(folder, "month"), Path(folder, "whole")
        outlast("synth", f"{folder}/m", "--shape", SHAPES[0], "--days", str(MONTH_DAYS))
        month_read = read(month, Path(folder, "m"))
        whole_read: list[Cost] = []
        for shape in SHAPES:
            logs = Path(folder, shape)
            outlast("synth", str(logs), "--shape", shape, "--days", str(asked.days))
            whole_read.append(read(whole, logs))
        pages = [
            outlast("report", str(month), "--out", f"{folder}/{turn}.html")
            for turn in range(asked.repeats)
        ]
        wholes = [outlast("report", str(whole), "--json") for _ in range(asked.repeats)]
        many = {"month": jobs_in(month), "whole": jobs_in(whole)}
    rows = [
        ("reading a month", month_read), ("reading all of RSC-1", whole_read[0]),
        ("page of a month", pages[0]), ("all analyses", wholes[0]),
    ]  # fmt: skip
    print(f"{many['month']:,} jobs in the month, {many['whole']:,} in all")
    shown = [(name, *(f"{each:.2f}" for each in cost)) for name, cost in rows]
    table(("", "seconds", "CPU seconds", "GB at most"), shown)
    figures = {
        "load_average": os.getloadavg()[0], "jobs": many,
        "month_page_s": [one.wall_s for one in pages], "all_s": [one.wall_s for one in wholes],
        "all_gb": max(one.peak_gb for one in wholes),
        "reading_gb": [month_read.peak_gb, whole_read[0].peak_gb],
    }  # fmt: skip
    bars = {
        "s: page of a month": (median([one.wall_s for one in pages]), MONTH_S),
        "s: all analyses of all jobs": (median([one.wall_s for one in wholes]), ALL_S),
        "GB: all analyses of all jobs": (max(one.peak_gb for one in wholes), ALL_GB),
        "memory of reading, all of RSC-1 over its month": (
            whole_read[0].peak_gb / month_read.peak_gb, FLAT,
        ),
    }  # fmt: skip
    return verdict("fleet", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
