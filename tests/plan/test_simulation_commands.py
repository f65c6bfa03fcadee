"""`outlast plan simulate` and `sweep` end to end: answers, tables, figures, Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")
pytest.importorskip("pyarrow", reason="tables need it: pip install 'outlast[plan]'")

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

import outlast
from outlast.cli.main import main
from outlast.errors import StorageError
from outlast.plan.model.scenario import scenario_of
from outlast.plan.simulate.replications import ROWS, simulate
from outlast.plan.simulate.result_tables import SUFFIXES, TableColumn, open_table, provenance
from outlast.plan.simulate.simulated_job import job_of

SAID = ("--gpus", "1024", "--failures", "5kh", "--work", "10d")
PATIENCE_S = 200.0


class Plan:
    """`outlast plan ... --json`: what it says, with the exit code that is expected."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> Any:
        assert main(["plan", *map(str, words), "--json"]) == code
        captured = self._capsys.readouterr()
        return json.loads(captured.out) if code in (0, 1, 4) else captured.err

    def text(self, *words: object) -> str:
        assert main(["plan", *map(str, words)]) == 0
        return self._capsys.readouterr().out


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("COLUMNS", "300")
    return Plan(capsys)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows, and what the table says of itself."""
    if path.suffix == ".json":
        found = json.loads(path.read_text())
        return found.pop("rows"), found
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file)), {}
    if path.suffix == ".arrow":
        with pa.ipc.open_file(path) as opened:
            found = opened.read_all()
    else:
        found = pq.read_table(path)
    said = found.schema.metadata or {}
    return found.to_pylist(), {key.decode(): json.loads(text) for key, text in said.items()}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_simulate_writes_a_row_for_each_run(plan: Plan, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"runs{suffix}"
    found = plan(
        "simulate", *SAID, "--strategy", "outlast", "--replications", 60, "--seed", 7,
        "--out", path,
    )  # fmt: skip
    rows, said = read(path)
    scenario = scenario_of({"gpus": "1024", "failures": "5kh", "work": "10d"})
    same = simulate(job_of(scenario, "outlast"), 60, seed=7)
    assert found["replications"] == len(rows) == 60
    assert [int(row["replication"]) for row in rows] == list(range(60))
    for name in ROWS.names or ():
        assert [float(row[name]) for row in rows] == same[name].tolist()
    if suffix != ".csv":
        assert isinstance(rows[0]["failures"], int) and said["seed"] == 7
        assert said["scenario"]["work_s"] == 10 * 86400 and said["strategy"] == "outlast"
        assert said["outlast_version"] == outlast.__version__
    assert list(tmp_path.iterdir()) == [path]


def test_simulate_prints_it_beside_theory(plan: Plan) -> None:
    text = plan.text("simulate", *SAID, "--replications", 50)
    assert "50 runs, seed 0; a save every" in text and "theory" in text
    assert "\nfrom storage" in text and "from memory" not in text


def test_sweep_writes_a_row_for_each_point(plan: Plan, tmp_path: Path) -> None:
    path, picture = tmp_path / "points.parquet", tmp_path / "map.svg"
    found = plan(
        "sweep", *SAID, "--over", "interval=10min,1h", "--over", "failures=5kh,9kh",
        "--strategy", "checkpoint-restart,outlast", "--replications", 20, "--out", path,
        "--figure", picture, "--measure", "dollars", code=2,
    )  # fmt: skip
    assert "failures: the field is given twice" in " ".join(found.split()) and not path.exists()
    found = plan(
        "sweep", *SAID, "--over", "interval=10min,1h", "--over", "cost=1s..100s/3",
        "--strategy", "checkpoint-restart,outlast", "--replications", 20, "--out", path,
        "--figure", picture, "--measure", "dollars",
    )  # fmt: skip
    rows, said = read(path)
    assert found["over"] == {"interval": ["10min", "1h"], "cost": ["1s", "10s", "100s"]}
    assert said["over"] == found["over"] and len(rows) == len(found["points"]) == 12
    for row, point in zip(rows, found["points"], strict=True):
        runs = point["runs"]
        assert row["interval_text"] == point["values"]["interval"]
        assert row["interval_s"] == point["theory"]["interval_s"] == row["save_every_s"]
        assert row["runs"] == runs["replications"] == 20
        assert row["p95_usd"] == runs["costs"]["high"]
        assert row["theory_goodput"] == point["theory"]["outcome"]["goodput"]
    assert rows[0]["cost_s"] == 1 and rows[0]["mean_restart_s"] > 0
    drawn = picture.read_text()
    assert drawn.startswith("<?xml") and "<svg" in drawn


def test_theory_alone_needs_no_runs(plan: Plan, tmp_path: Path) -> None:
    picture = tmp_path / "lines.svg"
    found = plan(
        "sweep", "--over", "gpus=1024..1048576/3", "--strategy", "all", "--replications", 0,
        "--figure", picture,
    )  # fmt: skip
    goodputs = [
        one["theory"]["outcome"]["goodput"]
        for one in found["points"]
        if one["strategy"] == "checkpoint-restart"
    ]
    assert len(goodputs) == 3 and goodputs == sorted(goodputs, reverse=True)
    assert all(one["runs"] is None for one in found["points"]) and picture.exists()
    text = plan.text("sweep", "--over", "gpus=1024,4096", "--replications", 0)
    assert "checkpoint-restart: 2 points, by formulas only" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", *SAID, "--replications", 0), "--replications 0"),
        (("simulate", *SAID, "--seed", -1), "seed -1: from 0"),
        (("simulate", *SAID, "--out", "runs.xls"), "must be one of .parquet"),
        (("simulate", *SAID, "--out", "none/runs.csv"), "there is no directory"),
        (("simulate", *SAID, "--workers", 0), "--workers 0"),
        (("simulate", *SAID, "--workers", 2, "--dask", "tcp://127.0.0.1:1"), "give one of them"),
        (("simulate", *SAID, "--dask", "nonsense://x"), "as in tcp://10.0.0.1:8786"),
        (("sweep", "--over", "gpus=1k,2k", "--strategy", "outlast,drp"), "--strategy drp"),
        (
            ("sweep", "--over", "gpus=1k", "--over", "work=1d", "--over", "step=1s"),
            "one or two fields",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(
    plan: Plan, words: tuple[object, ...], said: str
) -> None:
    assert said in " ".join(plan(*words, code=2).replace("│", "").split())


@pytest.fixture
def small_files() -> Iterator[None]:
    """The system writes no file beyond 8 KiB, as where a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_no_half_a_table(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    said = provenance(scenario_of({"gpus": "64"}))
    refused = pytest.raises(StorageError, match="nothing was kept of it")
    with refused, open_table(path, [TableColumn("wall_s", "number")], said) as made:
        made.write({"wall_s": np.random.default_rng(1).random(20_000)})
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("mine")
    said = plan("simulate", *SAID, "--out", path, code=2)
    assert "nothing was overwritten" in said and path.read_text() == "mine"


@pytest.mark.process
def test_ctrl_c_keeps_the_first_runs(tmp_path: Path) -> None:
    """Of a terminal: everybody in the group is told."""
    path = tmp_path / "runs.csv"
    command = (
        *(sys.executable, "-m", "outlast", "plan", "simulate", "--gpus", "64", "--json"),
        *("--replications", "900000000", "--workers", "2", "--out", str(path)),
    )
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE_S
        with selectors.DefaultSelector() as pause:
            while not any(each.stat().st_size > 9999 for each in tmp_path.iterdir()):
                assert time.monotonic() < deadline and process.poll() is None
                pause.select(0.02)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    found = json.loads(out)
    assert (process.returncode, err) == (4, b"")
    assert found["interrupted"] and "interrupted: the first" in found["warnings"][-1]
    rows, _ = read(path)
    assert len(rows) == found["replications"] > 0
    same = simulate(job_of(scenario_of({"gpus": "64"}), "checkpoint-restart"), 100)
    assert [float(row["wall_s"]) for row in rows[:100]] == same["wall_s"].tolist()


@pytest.mark.extended
def test_compilation_is_announced_once(tmp_path: Path) -> None:
    """In a process that finds nothing compiled; the second one loads what the first one kept."""
    code = (
        "from outlast.plan.simulate.replications import compile_once; compile_once();"
        " compile_once()"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    for times in (1, 0):
        said = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert said.stderr.count("compiling the simulator") == times
