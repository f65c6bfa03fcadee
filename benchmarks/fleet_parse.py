"""How long does accounting as text take to become typed columns, beside pandas doing the same?

Text of `--records` jobs (4 million are the 1.4 GB of eleven months of a 16k-GPU cluster) is made,
then both read it in turn; medians. `--odd` puts a line break into so many records of a million,
which pandas cannot read: then only we do.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from harness import median, table, verdict

from outlast.fleet import sacct

RATIO = 0.4  # of pandas' time, at most
COLUMNS = (
    "JobID", "JobIDRaw", "Cluster", "Partition", "Account", "User", "QOS", "JobName", "State",
    "ExitCode", "Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "NCPUS", "NodeList",
    "AllocTRES", "Priority", "Restarts", "FailedNode", "TimelimitRaw", "SubmitLine", "WorkDir",
)  # fmt: skip
STATES = ("COMPLETED", "FAILED", "CANCELLED by 1041", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL",
          "PREEMPTED", "REQUEUED")  # fmt: skip
SHARES = (0.55, 0.2, 0.12, 0.02, 0.01, 0.005, 0.05, 0.045)
BATCH = 100_000
BEGAN_S = 1_672_531_200  # 2023-01-01
SPAN_S = 334 * 86_400


def write(path: Path, records: int, odd_per_million: int, seed: int = 1) -> None:
    """Text as `sacct -X --parsable2 --duplicates` gives it."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(("|".join(COLUMNS) + "\n").encode())
        for first in range(0, records, BATCH):
            rows = _batch(first, min(BATCH, records - first), records, rng)
            if odd_per_million:
                torn = pl.Series(rng.random(rows.height) < odd_per_million / 1e6)
                rows = rows.with_columns(
                    SubmitLine=pl.when(torn)
                    .then(pl.lit("srun a \\\n  b || c"))
                    .otherwise("SubmitLine")
                )
            file.write(
                rows.write_csv(separator="|", include_header=False, quote_style="never").encode()
            )


def _batch(first: int, count: int, records: int, rng: np.random.Generator) -> pl.DataFrame:
    number = np.arange(first, first + count)
    submit = BEGAN_S + (number * (SPAN_S / records)).astype(np.int64)
    start = submit + rng.exponential(1800, count).astype(np.int64)
    span = np.minimum(rng.exponential(9000, count), 604_800).astype(np.int64)
    nodes = np.where(rng.random(count) < 0.9, 1, 2 ** rng.integers(1, 8, count))
    node = rng.integers(1, 1700, count)
    user = rng.integers(0, 300, count)
    rows = pl.DataFrame(
        {"job": 9_000_000 + number, "submit": submit, "start": start, "span": span, "nodes": nodes,
         "node": node, "user": user, "name": rng.integers(0, 2000, count),
         "State": rng.choice(STATES, count, p=SHARES), "Priority": rng.integers(1, 10**6, count)}
    )  # fmt: skip
    one, last = pl.col("node"), pl.col("node") + pl.col("nodes") - 1
    cpus, gpus = pl.col("nodes") * 96, pl.col("nodes") * 8
    names = pl.when(pl.col("nodes") == 1).then(
        pl.format("rsc1-node{}", one.cast(pl.String).str.zfill(4))
    )
    return rows.select(
        JobID="job", JobIDRaw="job", Cluster=pl.lit("rsc1"), Partition=pl.lit("learn"),
        Account=pl.format("team{}", pl.col("user") // 10), User=pl.format("user{}", "user"),
        QOS=pl.lit("normal"), JobName=pl.format("train_experiment_{}", "name"), State="State",
        ExitCode=pl.when(pl.col("State") == "FAILED").then(pl.lit("1:0")).otherwise(pl.lit("0:0")),
        Submit=_iso("submit"), Eligible=_iso("submit"), Start=_iso("start"),
        End=_iso(pl.col("start") + pl.col("span")), ElapsedRaw="span", NNodes="nodes", NCPUS=cpus,
        NodeList=names.otherwise(pl.format("rsc1-node[{}-{}]", one.cast(pl.String).str.zfill(4),
                                           last.cast(pl.String).str.zfill(4))),
        AllocTRES=pl.format("billing={},cpu={},gres/gpu={},gres/gpu:a100={},mem={}G,node={}",
                            cpus, cpus, gpus, gpus, pl.col("nodes") * 1000, "nodes"),
        Priority="Priority", Restarts=pl.lit(0), FailedNode=pl.lit(""), TimelimitRaw=pl.lit(10080),
        SubmitLine=pl.format("sbatch --job-name=train_experiment_{} run_{}.sh", "name", "user"),
        WorkDir=pl.format("/checkpoint/user{}", "user"),
    )  # fmt: skip


def _iso(seconds: str | pl.Expr) -> pl.Expr:
    column = pl.col(seconds) if isinstance(seconds, str) else seconds
    return pl.from_epoch(column).dt.to_string("%Y-%m-%dT%H:%M:%S")


def ours(path: Path) -> int:
    """All parts, as the lake would take them."""
    reading = sacct.read(path)
    for _ in reading:
        pass
    reading.totals.check()
    return reading.totals.records["jobs"]


def pandas(path: Path) -> int:
    """The same columns, typed, by the quickest way that we found."""
    pd: Any = import_module("pandas")
    text = ["JobID", "Cluster", "Partition", "Account", "User", "QOS", "JobName", "State",
            "ExitCode", "NodeList", "AllocTRES", "FailedNode", "SubmitLine"]  # fmt: skip
    whole = ["ElapsedRaw", "NNodes", "Priority", "Restarts"]
    moments = ["Submit", "Eligible", "Start", "End"]
    table = pd.read_csv(
        path, sep="|", usecols=text + whole + moments, quoting=3, engine="c", keep_default_na=False,
        dtype=dict.fromkeys(text, str) | dict.fromkeys(whole, "int64"),
    )  # fmt: skip
    for name in moments:
        table[name] = pd.to_datetime(table[name], format="%Y-%m-%dT%H:%M:%S").astype("int64")
    table["State"] = table["State"].str.partition(" ")[0].astype("category")
    # what few texts say is found out once each, as we do it
    ends, tres = table["ExitCode"].astype("category").cat, table["AllocTRES"].astype("category").cat
    codes = ends.categories.str.split(":", expand=True)
    for level, name in enumerate(("exit_code", "signal")):
        table[name] = codes.get_level_values(level).astype("int64").to_numpy()[ends.codes]
    gpus = tres.categories.str.extract(r"gres/gpu=(\d+)")[0].astype("int64")
    table["gpus"] = gpus.to_numpy()[tres.codes]
    assert (table["Start"] <= table["End"]).all()
    return len(table)


READERS = {"ours": ours, "pandas": pandas}


class Turn(NamedTuple):
    """One reading in a process of its own, imports not counted."""

    wall_s: float
    cpu_s: float
    peak_gb: float
    records: int


def turn(reader: str, path: Path) -> Turn:
    told = subprocess.run(
        [sys.executable, __file__, "--reader", reader, "--path", str(path)],
        check=True, capture_output=True, text=True, timeout=1200,
    ).stdout.split()  # fmt: skip
    wall_s, cpu_s, peak_gb, records = map(float, told)
    return Turn(wall_s, cpu_s, peak_gb, int(records))


def read(reader: str, path: Path) -> None:
    """What `turn` runs."""
    if reader == "pandas":
        import_module("pandas")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    records = READERS[reader](path)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{wall_s:.3f} {cpu_s:.3f} {peak_gb:.3f} {records}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--odd", type=int, default=0, help="records of a million with a line break")
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--path", type=Path)
    asked = parser.parse_args()
    if asked.reader:
        read(asked.reader, asked.path)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sacct.txt"
        write(path, asked.records, asked.odd)
        size_gb = path.stat().st_size / 1e9
        print(f"{asked.records:,} records, {size_gb:.2f} GB of text, {asked.turns} turns")
        readers = ["ours"] if asked.odd else list(READERS)
        turns = [{name: turn(name, path) for name in readers} for _ in range(asked.turns)]
    rows, figures = [], {}
    for name in readers:
        found = [each[name] for each in turns]
        assert {one.records for one in found} == {asked.records}
        wall_s, cpu_s = median([one.wall_s for one in found]), median([one.cpu_s for one in found])
        peak_gb = max(one.peak_gb for one in found)
        figures |= {f"{name}_wall_s": wall_s, f"{name}_cpu_s": cpu_s, f"{name}_peak_gb": peak_gb}
        rows.append((name, f"{wall_s:.2f}", f"{cpu_s:.2f}", f"{peak_gb:.2f}"))
    table(("reader", "seconds", "CPU seconds", "GB at most"), rows)
    if asked.odd:
        return 0
    ratio = figures["ours_wall_s"] / figures["pandas_wall_s"]
    return verdict("fleet_parse", figures, {"share of pandas' time": (ratio, RATIO)})


if __name__ == "__main__":
    sys.exit(main())
