"""Time to read accounting as text into typed columns, beside whatever other reader is installed.

Text of `--records` jobs (4 million are the 1.4 GB of eleven months of a 16k-GPU cluster) is made.
Then each reads it in turn: ours, pandas with its C engine and with pyarrow's, DuckDB; medians, and
who took the least processor time (user and system, of all threads) and the least wall time. Each
gives the same columns with the same types. What only ours does: it undoes line breaks and `|` in
free text, tells records from steps, and checks each row (host lists, times of a zone, states).
`--odd` puts a line break into so many records of a million: then only ours reads.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from harness import median, table, verdict

from outlast.fleet.formats import sacct

RATIO = 0.4  # of the time of pandas' C engine, at most
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
    reading = sacct.read_sacct(path)
    for _ in reading:
        pass
    reading.totals.check()
    return reading.totals.records["jobs"]


TEXT = ["JobID", "Cluster", "Partition", "Account", "User", "QOS", "JobName", "State",
        "ExitCode", "NodeList", "AllocTRES", "FailedNode", "SubmitLine"]  # fmt: skip
WHOLE = ["ElapsedRaw", "NNodes", "Priority", "Restarts"]
MOMENTS = ["Submit", "Eligible", "Start", "End"]


def pandas_c(path: Path) -> int:
    """Read with pandas' C engine; the same columns, typed."""
    pd: Any = import_module("pandas")
    table = pd.read_csv(
        path, sep="|", usecols=TEXT + WHOLE + MOMENTS, quoting=3, engine="c", keep_default_na=False,
        dtype=dict.fromkeys(TEXT, str) | dict.fromkeys(WHOLE, "int64"),
    )  # fmt: skip
    for name in MOMENTS:
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


def pandas_pyarrow(path: Path) -> int:
    """Read with pandas' pyarrow engine, whose columns stay Arrow's; the same columns, typed."""
    pd: Any = import_module("pandas")
    pa: Any = import_module("pyarrow")
    text = pd.ArrowDtype(pa.string())
    table = pd.read_csv(
        path, sep="|", usecols=TEXT + WHOLE + MOMENTS, engine="pyarrow",
        dtype_backend="pyarrow", keep_default_na=False,
        dtype=dict.fromkeys(TEXT, text) | dict.fromkeys(WHOLE, pd.ArrowDtype(pa.int64())),
    )  # fmt: skip
    moment = pd.ArrowDtype(pa.timestamp("ns"))
    for name in MOMENTS:
        table[name] = table[name].astype(moment)
    table["State"] = table["State"].str.partition(" ")[0].astype("category")
    ends, tres = table["ExitCode"].astype("category").cat, table["AllocTRES"].astype("category").cat
    codes = ends.categories.str.split(":", expand=True)
    for level, name in enumerate(("exit_code", "signal")):
        numbers = (
            codes.get_level_values(level)
            if codes.nlevels > 1
            else [int(each[level]) for each in codes]
        )
        table[name] = np.asarray(numbers).astype("int64")[ends.codes]
    gpus = tres.categories.str.extract(r"gres/gpu=(\d+)")[0].astype("int64")
    table["gpus"] = gpus.to_numpy()[tres.codes]
    assert (table["Start"] <= table["End"]).all()
    return len(table)


def duckdb(path: Path) -> int:
    """Read with DuckDB into an Arrow table; the same columns, typed."""
    database: Any = import_module("duckdb")
    kinds = dict.fromkeys(TEXT, "VARCHAR") | dict.fromkeys(WHOLE, "BIGINT")
    kinds |= dict.fromkeys(MOMENTS, "TIMESTAMP")
    columns = ", ".join(f"'{name}': '{kinds.get(name, 'VARCHAR')}'" for name in COLUMNS)
    moments = ", ".join(f'epoch_ns("{name}") AS "{name}"' for name in MOMENTS)
    texts = ", ".join(name for name in TEXT if name not in ("State", "ExitCode"))
    query = f"""
        SELECT {texts}, {", ".join(WHOLE)}, {moments},
            split_part(State, ' ', 1) AS State,
            split_part(ExitCode, ':', 1)::BIGINT AS exit_code,
            split_part(ExitCode, ':', 2)::BIGINT AS signal,
            regexp_extract(AllocTRES, 'gres/gpu=(\\d+)', 1)::BIGINT AS gpus
        FROM read_csv('{path}', delim='|', header=true, quote='', escape='', auto_detect=false,
            columns={{{columns}}})
    """
    found = database.sql(query).to_arrow_table()
    return int(found.num_rows)


READERS = {
    "ours": ours, "pandas-c": pandas_c, "pandas-pyarrow": pandas_pyarrow, "duckdb": duckdb,
}  # fmt: skip
NEEDS = {
    "ours": (), "pandas-c": ("pandas",), "pandas-pyarrow": ("pandas", "pyarrow"),
    "duckdb": ("duckdb", "pyarrow"),
}  # fmt: skip


def installed() -> list[str]:
    """Return the readers whose libraries are here, ours first."""
    return [name for name, needs in NEEDS.items() if all(map(find_spec, needs))]


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
    for name in NEEDS[reader]:
        import_module(name)
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
        readers = ["ours"] if asked.odd else installed()
        absent = sorted(READERS.keys() - set(readers))
        if absent and not asked.odd:
            print(f"not installed: {', '.join(absent)}")
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
    for what, key in (("processor", "cpu_s"), ("wall", "wall_s")):
        best = min(readers, key=lambda name: figures[f"{name}_{key}"])
        print(f"least {what} time: {best}, {figures[f'{best}_{key}']:.2f} s")
    if "pandas-c" not in readers:
        return 0
    ratio = figures["ours_wall_s"] / figures["pandas-c_wall_s"]
    bars = {"share of the time of pandas' C engine": (ratio, RATIO)}
    return verdict("fleet_parse", figures, bars)


if __name__ == "__main__":
    sys.exit(main())
