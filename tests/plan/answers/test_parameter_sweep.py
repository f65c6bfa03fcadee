"""Quantiles of runs and parameter sweeps: figures, executors, files and ends."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("numba", reason="the simulator is compiled: pip install 'outlast[plan]'")

from outlast.errors import OutlastError, UsageError
from outlast.plan.answers.parameter_sweep import SweepPoint, strategies_of, sweep, sweep_points
from outlast.plan.answers.run_distribution import run_distribution
from outlast.plan.answers.sweep_axes import parse_axis
from outlast.plan.model.scenario import scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.plan.simulate import replications
from outlast.plan.simulate.replications import simulate
from outlast.plan.simulate.simulated_job import job_of
from outlast.process_pool import dask_executor, local_executor

SAID = {"gpus": "1024", "failures": "5kh", "work": "10d"}
KEPT = "earlier simulated runs are kept"
OVER = ["gpus=1024,4096", "interval=10min,1h"]


def wanted(*strategies: str) -> list[SweepPoint]:
    said = {"failures": "5kh", "work": "10d"}
    return sweep_points(said, None, OVER, strategies_of(",".join(strategies or ["outlast"])))


# --- numbers ---


def test_a_distribution_agrees_with_its_rows() -> None:
    scenario = scenario_of(SAID)
    given: list[np.ndarray] = []
    found = run_distribution(scenario, "peer-memory", 5000, seed=3, on_rows=given.append)
    rows = np.concatenate(given)
    assert (
        len(given) > 1 and (rows == simulate(job_of(scenario, "peer-memory"), 5000, seed=3)).all()
    )
    told = {one.name: one for one in found.tallies}
    wall_s = rows["wall_s"]
    assert told["takes"].mean == pytest.approx(wall_s.mean(), rel=1e-12)
    assert told["takes"].error == pytest.approx(wall_s.std(ddof=1) / math.sqrt(5000))
    for one, share in ((told["takes"].low, 0.05), (told["takes"].high, 0.95)):
        assert one == pytest.approx(np.quantile(wall_s, share), rel=1e-3)
    assert told["failures"].middle == np.median(rows["failures"])
    hour_usd = 2.5 * (1024 + 8 * found.spares)
    assert told["costs"].mean == pytest.approx(hour_usd * wall_s.mean() / 3600)
    assert told["goodput"].mean == pytest.approx((scenario.work_s / wall_s).mean())
    for name in ("takes", "failures", "costs"):
        assert abs(told[name].z or math.inf) < 4


def test_runs_that_have_no_end_are_counted_and_cost_no_hours() -> None:
    found = run_distribution(scenario_of({"gpus": "16777216"}), "checkpoint-restart", 3)
    assert found.unfinished == 3 and found.tallies[0].middle == math.inf
    assert found.tallies[0].error is None
    assert "3 of 3 runs have no end: 100,000 failures came first" in found.warnings[-1]


def test_points_are_each_with_each() -> None:
    found = wanted("outlast", "drop")
    assert [(p.values["gpus"], p.values["interval"], p.strategy) for p in found[:3]] == [
        ("1024", "10min", "drop"), ("1024", "10min", "outlast"), ("1024", "1h", "drop"),
    ]  # fmt: skip
    assert len(found) == 8 and found[-1].scenario.gpus == 4096
    assert found[-1].scenario.interval_s == 3600


def test_a_point_is_the_same_alone_and_among_others() -> None:
    found = sweep(wanted("migrate", "outlast"), 50, seed=3)
    point = wanted("migrate", "outlast")[-1]
    rows = simulate(job_of(point.scenario, point.strategy), 50, seed=3)
    runs, theory = found.points[-1].runs, found.points[-1].theory
    assert runs is not None and theory == predict(point.scenario, point.strategy)
    assert runs.takes.mean == pytest.approx(rows["wall_s"].mean(), rel=1e-12)
    assert runs.means["redo_s"] == pytest.approx(rows["redo_s"].mean(), rel=1e-9)
    assert abs(runs.takes.z or math.inf) < 4


def test_impossible_points_state_the_reason_and_the_others_run() -> None:
    some = sweep_points({"work": "1d"}, None, ["gpus=8,64"], ["migrate"])
    none, found = sweep(some, 5).points
    assert none.runs is None and none.theory is None and "two replicas" in none.why
    assert found.runs is not None and found.runs.replications == 5


# --- what it goes over ---


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("gpus=1k,4k", ["1k", "4k"]),
        ("gpus=1024..1048576/4", ["1024", "10240", "102400", "1048576"]),
        ("spares=1..4/9", ["1", "2", "3", "4"]),
        ("interval=1min..100min/3", ["1min", "10min", "100min"]),
        ("interval=1min..4h/3", ["1min", "15.49min", "4h"]),
        ("failures=10kh..1000kh/3", ["10kh", "100kh", "1000kh"]),
        ("failures=1/1000 node-days..9/1000 node-days/3",
         ["1/1000 node-days", "3/1000 node-days", "9/1000 node-days"]),
        ("fatal=1%..4%/3", ["1%", "2%", "4%"]),
    ],
)  # fmt: skip
def test_ranges(text: str, values: list[str]) -> None:
    assert list(parse_axis(text, {}).texts) == values


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("gpus", "give a field and its values"),
        ("gpus=1k..1M", "give the number of values"),
        ("gpus=4k,4k", "4k is given twice"),
        ("interval=1min..4/3", "have different units"),
        ("interval=4h..1h/3", "0 < first < last"),
        ("failures=rsc-1..rsc-2/3", "'rsc-1' is not an end"),
        ("intervall=1h,2h", "did you mean --interval"),
        ("gpus=1k,1001", "gpus=1001: .* not a multiple of 8"),
        ("work=1d,2d", "given twice"),
        ("interval=1min..9h/999", "points with all strategies"),
    ],
)
def test_invalid_axes_are_refused_by_name(over: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sweep_points(
            {"work": "3d", "gpus_per_node": "8", **({} if "gpus=" in over else {"gpus": "64"})},
            None,
            [over],
            strategies_of("all"),
        )


# --- where it runs ---


class Counting(ThreadPoolExecutor):
    """Knows how many parts were handed to it that nobody has taken back."""

    def __init__(self) -> None:
        super().__init__(2)
        self.ahead, self.most = 0, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.ahead += 1
        self.most = max(self.most, self.ahead)
        return super().submit(fn, *args, **kwargs)


def test_a_bounded_number_of_parts_is_in_flight() -> None:
    job = job_of(scenario_of({**SAID, "gpus": "64"}), "outlast")._replace(failures_max=2)
    with Counting() as pool:
        for _ in replications.results(
            zip(count(), replications.parts(job, 200_000)), pool, in_flight=5
        ):
            pool.ahead -= 1
    assert pool.most == 5


class Failing(Executor):
    """Breaks what it is given of the jobs with so many nodes."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = Future()
        if args[0].job.nodes == self._nodes:
            made.set_exception(MemoryError("no room"))
        else:
            made.set_result(fn(*args, **kwargs))
        return made


def test_a_point_that_fails_names_itself_and_the_others_go_on() -> None:
    found = sweep(wanted(), 20, executor=Failing(512))
    failed = [one.failed for one in found.points]
    assert failed == ["", "", *[f"MemoryError: no room; {KEPT}"] * 2] and not found.interrupted
    assert found.points[0].runs is not None and found.points[0].runs.replications == 20
    assert any("gpus=4096 interval=10min outlast" in text for text in found.warnings)
    with pytest.raises(OutlastError, match="from 0 failed; no results were kept: MemoryError"):
        run_distribution(wanted()[-1].scenario, "outlast", 5, executor=Failing(512))


@pytest.mark.process
def test_a_killed_worker_process_is_reported() -> None:
    def kill(*_: object) -> None:
        for worker in active_children()[:1]:
            worker.kill()

    lost = "a worker process died (killed, possibly out of memory); try again with fewer"
    with local_executor(2) as place:
        found = sweep(wanted(), 9000, executor=place.executor, in_flight=2, on_progress=kill)
    assert {one.failed for one in found.points} - {""} == {f"{lost} --workers; {KEPT}"}
    assert found.points[0].runs is not None and not found.interrupted
    refused = pytest.raises(OutlastError, match=re.escape(f"no results were kept: {lost}"))
    with local_executor(2) as (pool, _), refused:
        run_distribution(
            scenario_of(SAID), "drop", 90_000, executor=pool, in_flight=2, on_rows=kill
        )


KILLED = """
import os, signal, sys, threading
from concurrent.futures import BrokenExecutor
from outlast.process_pool import ProcessPool

def kill_in_write(main):
    while sys._current_frames()[main].f_code.co_name not in ("_send", "write_bytes"):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

def large(is_last):
    if is_last:
        threading.Thread(target=kill_in_write, args=[threading.get_ident()]).start()
    return bytes(100_000_000)

if __name__ == "__main__":
    with ProcessPool(1) as pool:
        assert len(pool.submit(large, False).result(30)) == 100_000_000
        try:
            pool.submit(large, True).result(30)
        except BrokenExecutor:
            sys.exit(9)
"""


@pytest.mark.process
def test_a_worker_killed_in_the_write_of_a_large_result_ends_the_wait(tmp_path: Path) -> None:
    """In a process of its own: a pool that reads for ever also keeps its parent from exiting."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, str(script)], env=environment, timeout=60, check=False)
    assert ended.returncode == 9 and list(tmp_path.iterdir()) == [script]


def test_another_outlast_is_refused() -> None:
    part = next(replications.parts(job_of(scenario_of(SAID), "outlast"), 1))
    with pytest.raises(UsageError, match=r"requested by outlast 0\.0"):
        replications.run_part(msgspec.structs.replace(part, version="0.0"))


@pytest.mark.process
def test_processes_give_the_same() -> None:
    here = sweep(wanted(), 30, seed=5)
    with local_executor(2) as place:
        there = sweep(wanted(), 30, seed=5, executor=place.executor, in_flight=place.in_flight)
    assert there == here


def test_a_dask_cluster_gives_the_same() -> None:
    distributed = pytest.importorskip("distributed", reason="pip install 'outlast[dask]'")
    here = sweep(wanted(), 30, seed=5)
    cluster = distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None,
        protocol="tcp", host="127.0.0.1",
    )  # fmt: skip
    with cluster, dask_executor(cluster.scheduler_address) as place:
        there = sweep(wanted(), 30, seed=5, executor=place.executor, in_flight=place.in_flight)
    assert there == here


def test_ctrl_c_keeps_what_is_done() -> None:
    """The first runs of every point, as a shorter sweep has them."""
    told = iter(range(3, -1, -1))

    def press(_done: int, _all: int) -> None:
        if next(told, None) == 0:
            os.kill(os.getpid(), signal.SIGINT)

    found = sweep(wanted(), 9000, on_progress=press)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    done = [one.runs.replications for one in found.points if one.runs]
    assert found.interrupted and len(done) == 4 and 0 < sum(done) < 4 * 9000
    assert any("fewer runs than requested" in text for text in found.warnings)
    short = sweep(wanted(), done[0]).points[0]
    assert short.runs == found.points[0].runs
