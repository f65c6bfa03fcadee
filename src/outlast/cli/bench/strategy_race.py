"""`outlast bench`: recovery strategies on the same job and the same failures."""

from __future__ import annotations

import math
import os
import platform
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from msgspec.structs import replace

from outlast import __version__, config, quantities
from outlast.cli.bench.kill_schedule import (
    KillSchedule,
    PlannedKill,
    draw_schedule,
    read_schedule,
)
from outlast.cli.bench.strategy_runs import (
    BY_POLICY,
    STRATEGIES,
    TORCHFT,
    UNDISTURBED,
    BenchJob,
    Strategy,
    StrategyResult,
    judge,
    predict,
    result_of,
    train,
)
from outlast.cli.bench.torchft_runs import race_torchft, why_not_installed
from outlast.cli.output_stream import Printer, print_json
from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, RunDirError, UsageError
from outlast.plan.answers.policy_trial import MeasuredJob, measure
from outlast.telemetry.event_store import read_events
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration, percentage

WORLD = 4
STEPS_MIN = 50
TIMES = 20  # the schedule is as long as this many undisturbed runs
PROBE_KILLS = (PlannedKill(at_s=4.0, rank=1), PlannedKill(at_s=13.0, rank=2))
START_S = 120.0  # of a launcher, at most
UNDISTURBED_S = 7200.0  # an undisturbed run that takes longer is stopped
LATE = 10  # times the undisturbed time, after which a strategy is stopped
PROBE_S = 19.0  # of a short run, whose times of recovery are the prediction's


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `not_run`: strategies that were not run, and why. `load`: of the machine
    at the start and at the end."""

    version: int = 1
    outlast: str
    machine: str
    load: tuple[float, float]
    job: BenchJob
    schedule: KillSchedule
    undisturbed_s: tuple[float, float]
    results: list[StrategyResult]
    not_run: dict[str, str]
    folder: str
    figure: str


def bench(
    *,
    run_dir: Path | None = None,
    steps: int = 600,
    every: str = "10s",
    seed: int = 0,
    schedule: Path | None = None,
    strategy: Annotated[list[str] | None, Parameter(negative="")] = None,
    checkpoint_every: int = 50,
    notice: str = "5s",
    price: str = "$2.50",
    json: bool = False,
) -> int:
    """Compare recovery strategies on the same job under the same kills.

    A small GPT is trained with 4 ranks by real processes, one strategy after
    another, while workers are killed by one schedule, which is written beside the
    results. A short run of each strategy comes first; from its times and the
    schedule the plan's simulator predicts the time, with a band.

    Exit code 0: each job of ours that ended has the weights of the undisturbed one,
    bit by bit; or, where ranks have left, each of its samples once.

    Parameters
    ----------
    run_dir
        New directory for runs, schedule, report and figure (default: under `runs/`).
    steps
        Number of training steps, at least 50.
    every
        Mean time between two kills.
    seed
        Random seed of the schedule.
    schedule
        Published schedule (schedule.json), in place of --every and --seed.
    strategy
        Strategy to run (default: all). Repeatable.
    checkpoint_every
        Steps between checkpoints of the strategies that restart from them.
    notice
        Time of the notice before each kill, for move-on-notice.
    price
        Price of a rank for an hour; spares count.
    json
        Print one JSON object on stdout at the end, and all other output on stderr.
    """
    every_s = _span("--every", every)
    notice_s = _span("--notice", notice)
    price_usd = quantities.price(f"--price {price}", price)
    if steps < STEPS_MIN or checkpoint_every < 1:
        raise UsageError(
            f"--steps {steps} --checkpoint-every {checkpoint_every}: at least {STEPS_MIN} and 1"
        )
    chosen = _chosen(strategy)
    given = read_schedule(schedule, WORLD) if schedule else None
    config.check_torch()
    folder = run_dir or config.run_dir_default() / time.strftime("bench-%Y%m%d-%H%M%S")
    _make(folder)
    job = BenchJob(world=WORLD, steps=steps, every=checkpoint_every, notice_s=notice_s)
    race = _Race(folder, job, price_usd, Printer(stderr=json))
    report = race.run(chosen, given, seed, every_s)
    _write(folder / "report.json", report)
    if json:
        print_json(report)
    else:
        _show(report, Printer())
    right = all(map(_is_right, report.results))
    return EXIT_DONE if right else EXIT_GAVE_UP


def _is_right(one: StrategyResult) -> bool:
    """Return whether a job that ended has kept its promise; torchft promises nothing here."""
    if one.outcome != "done" or one.strategy == TORCHFT.name:
        return True
    once = not one.samples_lost and not one.samples_repeated
    return one.weights == "equal" or (one.weights == BY_POLICY and once)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise RunDirError(f"{folder}: {error.strerror}; nothing was started") from error
    if not is_empty:
        raise RunDirError(f"{folder} is not empty; nothing was started; give another --run-dir")


def _span(flag: str, text: str) -> float:
    seconds = quantities.measured(quantities.SECONDS, f"{flag} {text}", text, "10s")
    if not 0 < seconds < math.inf:
        raise UsageError(f"{flag} {text}: give a duration above zero, as in 10s")
    return seconds


def _chosen(names: list[str] | None) -> tuple[Strategy, ...]:
    known = {one.name: one for one in STRATEGIES}
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(f"--strategy {unknown[0]}: not one of {', '.join(known)}")
    why_not = why_not_installed()
    if names and TORCHFT.name in names and why_not:
        raise UsageError(f"--strategy torchft: {why_not}; nothing was started")
    if names:
        return tuple(known[name] for name in dict.fromkeys(names))
    return tuple(one for one in STRATEGIES if one is not TORCHFT or not why_not)


class _Race:
    def __init__(self, folder: Path, job: BenchJob, price_usd: float, console: Printer) -> None:
        self._folder, self._job, self._price_usd = folder, job, price_usd
        self._console = console

    def run(
        self, chosen: tuple[Strategy, ...], given: KillSchedule | None, seed: int, every_s: float
    ) -> BenchReport:
        """Run the undisturbed job, all strategies, and the undisturbed job again."""
        before = os.getloadavg()[0]
        reference = self._undisturbed("undisturbed")
        pace_s = reference.step_s
        until_s = TIMES * self._job.steps * pace_s
        schedule = given or draw_schedule(seed, every_s, WORLD, until_s)
        _write(self._folder / "schedule.json", schedule)
        ours = [one for one in chosen if one is not TORCHFT]
        measured = {one.name: self._probe(one, pace_s) for one in ours}
        found = []
        for one in chosen:
            self._say(f"{one.name}: {self._job.steps} steps")
            found.append(self._result(one, schedule, pace_s))
            self._say(f"{one.name}: {found[-1].outcome} after {duration(found[-1].wall_s)}")
        again = self._undisturbed("undisturbed-again")
        paces_s = min(pace_s, again.step_s), max(pace_s, again.step_s)
        times_s = reference.finish_s or 0.0, again.finish_s or 0.0
        plain_s = sum(times_s) / 2
        judged = [reference]
        for one, result in zip(chosen, found, strict=True):
            share = plain_s / result.finish_s if result.finish_s else None
            shown = replace(result, of_undisturbed=share)
            if one.name in measured:
                prediction = predict(measured[one.name], one, self._job, schedule.kills, paces_s)
                shown = judge(shown, prediction, paces_s)
            judged.append(shown)
        report = BenchReport(
            outlast=__version__,
            machine=f"{platform.machine()}, {os.cpu_count()} processors, Python"
            f" {platform.python_version()}",
            load=(before, os.getloadavg()[0]),
            job=self._job,
            schedule=replace(schedule, kills=_struck(schedule, found)),
            undisturbed_s=times_s,
            results=judged,
            not_run={TORCHFT.name: why_not} if (why_not := why_not_installed()) else {},
            folder=str(self._folder),
            figure="",
        )
        return replace(report, figure=self._figure(report))

    def _result(self, one: Strategy, schedule: KillSchedule, pace_s: float) -> StrategyResult:
        reference, folder = self._folder / "undisturbed", self._folder / one.name
        limit_s = START_S + LATE * self._job.steps * pace_s
        if one is TORCHFT:
            return race_torchft(
                self._job,
                folder,
                schedule.kills,
                reference,
                limit_s=limit_s,
                price_usd=self._price_usd,
            )
        run = train(one, self._job, folder, schedule.kills, limit_s)
        return result_of(run, self._job, reference, self._price_usd)

    def _undisturbed(self, name: str) -> StrategyResult:
        self._say(f"{name}: {self._job.steps} steps")
        run = train(UNDISTURBED, self._job, self._folder / name, (), UNDISTURBED_S)
        result = result_of(run, self._job, self._folder / "undisturbed", self._price_usd)
        if result.outcome != "done":
            raise RunDirError(
                f"the undisturbed run ended with exit code {run.code}: {result.reason}; see"
                f" {self._folder / name}.log"
            )
        return replace(result, of_undisturbed=1.0)

    def _probe(self, strategy: Strategy, pace_s: float) -> MeasuredJob:
        steps = max(STEPS_MIN, round(PROBE_S / pace_s))
        self._say(f"{strategy.name}: {steps} steps with {len(PROBE_KILLS)} kills, to be measured")
        job = replace(self._job, steps=steps, every=min(self._job.every, max(1, steps // 8)))
        folder = self._folder / f"{strategy.name}-measured"
        run = train(strategy, job, folder, PROBE_KILLS, START_S + LATE * PROBE_S)
        return measure(read_events(run.run_dir))

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _figure(self, report: BenchReport) -> str:
        try:
            from outlast.cli.bench.race_figure import draw_race
        except ModuleNotFoundError as error:
            self._say(f"no figure: {error.name} is missing; pip install 'outlast[figures]'")
            return ""
        path = self._folder / "figure.svg"
        draw_race(path, report.results)
        return str(path)


def _struck(schedule: KillSchedule, found: list[StrategyResult]) -> tuple[PlannedKill, ...]:
    """Return the kills up to the last one that reached any run; all are in schedule.json."""
    most = max((sum(one.kills.values()) for one in found), default=0)
    return schedule.kills[:most]


def _write(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _show(report: BenchReport, console: Printer) -> None:
    times = ("finish", "of undisturbed", "ETTR", "goodput", "price")
    grid = table(
        text_column("strategy", wrap=False), *map(number_column, times), text_column("predicted")
    )
    for one in report.results:
        grid.add_row(
            one.strategy,
            duration(one.finish_s) if one.finish_s else one.outcome,
            *map(_share, (one.of_undisturbed, one.ettr, one.goodput)),
            f"${one.cost_usd:.2f}",
            _predicted(one),
        )
    console.print(grid)
    counts = ("kills", "redone", "lost", "max difference")
    grid = table(
        text_column("strategy", wrap=False),
        *map(number_column, counts),
        text_column("weights"),
        text_column("recoveries"),
    )
    for one in report.results:
        most = one.loss_difference_max
        grid.add_row(
            one.strategy,
            str(one.kills.get("killed", 0)),
            f"{one.samples_repeated:,}",
            f"{one.samples_lost:,}"
            + f" ({one.samples_unknown} unknown)" * (one.samples_unknown > 0),
            f"{most:g}" if most is not None else "",
            one.weights,
            ", ".join(f"{count} {rung}" for rung, count in one.rungs.items()),
        )
    console.print(grid)
    console.print(
        "finish: from the first step of all ranks to their last one; ETTR and goodput: of the whole"
        " run, with its start; redone, lost: samples.",
        soft_wrap=True,
    )
    for one in report.results:
        if one.why:
            verdict = f", {one.verdict}" if one.verdict else ""
            console.print(f"{one.strategy}{verdict}: {one.why}", soft_wrap=True)
    for name, why in report.not_run.items():
        console.print(f"{name}: {why}", soft_wrap=True)
    load = f"load {report.load[0]:.1f} at the start, {report.load[1]:.1f} at the end"
    console.print(f"{report.machine}; {load}; all files: {report.folder}", soft_wrap=True)


def _share(part: float | None) -> str:
    return "" if part is None else percentage(part)


def _predicted(one: StrategyResult) -> str:
    if one.predicted is None:
        return "the reference" if one.strategy == UNDISTURBED.name else "none"
    low, high = duration(one.predicted.low_s), duration(one.predicted.high_s)
    return f"{low} to {high}: {one.verdict}"
