"""Strategies of `outlast bench`: their commands, runs, measured figures and predictions."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from outlast import config
from outlast.cli.bench.kill_schedule import KillInjector, KillRecord, PlannedKill
from outlast.cli.demo import DIGEST, difference_max, example
from outlast.events import AnyEvent, Decided, GenerationOpened, Metrics, PhaseDone
from outlast.launch.policies.policy_files import read_policy
from outlast.plan.answers.policy_trial import MeasuredJob, measure, try_on_schedule
from outlast.plan.simulate.scheduled_failures import ScheduledFailure
from outlast.telemetry.event_store import bit_texts, read_events, reported_losses
from outlast.telemetry.run_summary import RunSummary, summarise
from outlast.text_formatting import duration

BATCH = 8  # samples of a rank and step
REFILL_S = 5.0
ATTEMPTS_MAX = 1000  # kills that come one after another are no fault of the job
# Of measured times of recovery, for the band of a prediction.
QUICKER, SLOWER = 0.8, 1.25
PACE_SPREAD = 0.03  # of steps, besides what two undisturbed runs differ by


class Strategy(NamedTuple):
    """A strategy: policy, spares, and whether they are hot, saves, and notices before kills.
    `leaves`: ranks leave, so that the weights are not those of an undisturbed run."""

    name: str
    policy: str
    spares: int = 0
    is_hot: bool = False
    saves: tuple[str, ...] = ()
    has_notices: bool = False
    leaves: bool = False

    @property
    def flags(self) -> list[str]:
        """Return the flags of `outlast run`."""
        return [f"--policy={self.policy}", f"--spares={self.spares}", *self.saves]


_DISK = "--checkpoint-every={every}"
UNDISTURBED = Strategy("undisturbed", "default")
TORCHFT = Strategy("torchft", "", leaves=True)  # torchft_runs.py
BY_POLICY = "not equal by policy"
STRATEGIES = (
    Strategy("restart-from-disk", "checkpoint-restart", saves=(_DISK,)),
    Strategy("restart-from-memory", "memory-restart", saves=(_DISK, "--snapshot-every=5")),
    Strategy("replace-warm", "exact", spares=1),
    Strategy("replace-hot", "exact", spares=1, is_hot=True),
    Strategy("move-on-notice", "exact", spares=1, is_hot=True, has_notices=True),
    Strategy("elastic", "torchft-like", leaves=True),
    TORCHFT,
)


class BenchJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job that all strategies run. `every`: steps between checkpoints, where there are any."""

    world: int
    steps: int
    every: int
    notice_s: float


class SchedulePrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time from the first step to the last one, and the rungs."""

    finish_s: float
    low_s: float
    high_s: float
    rungs: dict[str, int]


class StrategyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. `finish_s`: from the first step that all ranks have completed to their
    last one; None if the job did not end. `wall_s`: of the launcher. `weights`: equal | DIFFER, or
    BY_POLICY where ranks have left; "" of a job that did not end. `loss_difference_max`: of losses
    of the same rank and step, which are of other samples once ranks have left."""

    strategy: str
    command: str
    outcome: str
    reason: str = ""
    finish_s: float | None
    wall_s: float
    of_undisturbed: float | None = None  # undisturbed time over this one
    ettr: float | None
    goodput: float | None
    kills: dict[str, int]  # by fate
    rungs: dict[str, int]
    step_s: float
    recovery_s: float  # from faults until steps went on, without redone ones
    steps_redone: int
    samples_lost: int  # that the undisturbed run has trained, and this one has not
    samples_unknown: int = 0  # trained by a rank that died with its report
    samples_repeated: int  # trained again, or redone
    loss_difference_max: float | None = None
    weights: str = ""
    cost_usd: float
    predicted: SchedulePrediction | None = None
    verdict: str = ""  # inside | below | above
    why: str = ""


class StrategyRun(NamedTuple):
    """A run that has ended."""

    strategy: Strategy
    run_dir: Path
    command: str
    code: int
    records: list[KillRecord]
    late: str  # why it was stopped; "": it was not


def train(
    strategy: Strategy,
    job: BenchJob,
    run_dir: Path,
    kills: tuple[PlannedKill, ...],
    limit_s: float,
) -> StrategyRun:
    """Run the job under a strategy, and kill its workers; stop it after `limit_s`."""
    flags = [flag.format(every=job.every) for flag in strategy.flags]
    script = [str(example()), f"--steps={job.steps}", f"--batch={BATCH}"]
    script += ["--bench"]
    script += ["--hot-spares"] if strategy.is_hot else []
    words = ["run", "--plain", f"--nproc-per-node={job.world}", f"--run-dir={run_dir}", *flags]
    words.append(f"--limit=attempts_max={ATTEMPTS_MAX}")
    notice_s = job.notice_s if strategy.has_notices else 0.0
    injector = KillInjector(run_dir, kills, job.world, job.steps, notice_s)
    with run_dir.with_suffix(".log").open("wb") as log:
        command = [sys.executable, "-m", "outlast", *words, *script]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        injector.start()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
        finally:
            injector.stop()
            is_late = process.poll() is None
            if is_late:  # it saves, and ends its workers
                process.terminate()
                limits = config.Limits()
                process.wait(limits.stop_s + limits.kill_s + 10)
    return StrategyRun(
        strategy=strategy,
        run_dir=run_dir,
        command=" ".join(["outlast", *words, *script]),
        code=process.returncode,
        records=injector.records,
        late=f"stopped after {duration(limit_s)}" if is_late else "",
    )


def result_of(run: StrategyRun, job: BenchJob, reference: Path, price_usd: float) -> StrategyResult:
    """Return the figures of a run. `reference`: the undisturbed one."""
    events = read_events(run.run_dir)
    summary = summarise(run.run_dir)
    measured = measure(events)
    losses, expected = reported_losses(run.run_dir), reported_losses(reference)
    lost, repeated = compare_batches(trained_batches(run.run_dir), trained_batches(reference))
    unknown = min(lost, unreported_batches(run.run_dir))
    fates = [record.fate for record in run.records]
    ranks = job.world + run.strategy.spares
    is_done = summary.outcome == "done"
    redone = summary.committed_steps_lost or 0
    both = {key: losses[key] for key in losses if key in expected and key[2] != "batch"}
    is_equal = bit_texts(losses) == bit_texts(expected) and (
        digest(run.run_dir) == digest(reference) != ""
    )
    rungs = _rungs(summary)
    weights = "equal" if is_equal else BY_POLICY if rungs.get("shrink") else "DIFFER"
    return StrategyResult(
        strategy=run.strategy.name,
        command=run.command,
        outcome=summary.outcome,
        reason=run.late or (summary.cause.detail if summary.cause and not is_done else ""),
        finish_s=_finish_s(run.run_dir) if is_done else None,
        wall_s=summary.wall_s,
        ettr=summary.ettr,
        goodput=summary.goodput,
        kills={fate: fates.count(fate) for fate in dict.fromkeys(fates)},
        rungs=rungs,
        step_s=measured.step_s,
        recovery_s=sum(sum(each) for each in measured.rungs_s.values())
        + sum(failure.detect_s for failure in measured.failures),
        steps_redone=redone,
        samples_lost=(lost - unknown) * BATCH,
        samples_unknown=unknown * BATCH,
        samples_repeated=(repeated + redone * job.world) * BATCH,
        loss_difference_max=difference_max(both, {key: expected[key] for key in both}),
        weights=weights if is_done else "",
        cost_usd=summary.wall_s * ranks / 3600 * price_usd,
    )


def trained_batches(run_dir: Path) -> Counter[float]:
    """Return how often each batch counted in a step that was committed, by its checksum. A repeated
    step counts once: of its batch, the last report."""
    return Counter(_reported_batches(read_events(run_dir)).values())


def unreported_batches(run_dir: Path) -> int:
    """Return how many batches of committed steps nobody has reported: those of ranks that died
    behind a commit and left, since no successor took their results."""
    events = read_events(run_dir)
    reported = _reported_batches(events)
    committed = {event.step for event in events if isinstance(event, PhaseDone)}
    count, absent = 0, set[int]()
    for event in events:
        if isinstance(event, Decided):
            leaving = set(event.absent) - absent
            absent = set(event.absent)
            is_known = event.verdict == "commit" or event.step in committed
            count += sum(is_known and (seat, event.step) not in reported for seat in leaving)
    return count


def _reported_batches(events: Sequence[AnyEvent]) -> dict[tuple[int, int], float]:
    """Return the batch of each rank and committed step."""
    steps = [event for event in events if isinstance(event, PhaseDone) and event.kind == "step"]
    done = {(event.seat, event.step) for event in steps}
    committed: dict[int, int] = {}  # the first generation in which a rank has completed a step
    for event in steps:
        committed[event.step] = min(event.generation, committed.get(event.step, event.generation))
    batches: dict[tuple[int, int], float] = {}
    generation = 0
    for event in sorted(events, key=lambda one: one.t_ns):
        if isinstance(event, GenerationOpened):
            generation = event.generation
        elif (
            isinstance(event, Metrics)
            and "batch" in event.values
            # A rank that died in a committed step may have no event of its end: its successor
            # reports the step's numbers, in a later generation.
            and (
                (event.seat, event.step) in done
                or generation >= committed.get(event.step, generation + 1)
            )
        ):
            batches[event.seat, event.step] = event.values["batch"]
    return batches


def compare_batches(ours: Counter[float], expected: Counter[float]) -> tuple[int, int]:
    """Return how many batches are missing, and how many are trained more often than expected."""
    return (expected - ours).total(), (ours - expected).total()


def predict(
    measured: MeasuredJob,
    strategy: Strategy,
    job: BenchJob,
    kills: tuple[PlannedKill, ...],
    paces_s: tuple[float, float],
) -> SchedulePrediction:
    """Return what the plan's simulator predicts for exactly this schedule, from a short run of the
    strategy (`measured`) and the shortest and longest step of undisturbed runs."""
    world = job.world
    kind = "requested" if strategy.has_notices else "killed"
    ahead_s = job.notice_s if strategy.has_notices else 0.0
    detected_s = [failure.detect_s for failure in measured.failures] or [0.0]
    detect_s = sum(detected_s) / len(detected_s)
    failures = tuple(
        ScheduledFailure(
            t_s=max(0.0, kill.at_s - ahead_s), kind=kind, seats=(kill.rank,), detect_s=detect_s
        )
        for kill in kills
    )
    policy = read_policy(strategy.policy)
    found = []
    low_s, high_s = paces_s
    for share, factor, pace_s in (
        (0.0, QUICKER, low_s * (1 - PACE_SPREAD)),
        (0.5, 1.0, (low_s + high_s) / 2),
        (1.0, SLOWER, high_s * (1 + PACE_SPREAD)),
    ):
        scaled = {rung: tuple(s * factor for s in each) for rung, each in measured.rungs_s.items()}
        # Fewer ranks may make shorter steps, where they share the processors: as many samples.
        shares = {
            absent: measured.step_shares.get(absent, 1 - (1 - share) * absent / world)
            for absent in range(1, world)
        }
        of_schedule = replace(
            measured,
            steps=job.steps,
            spares=strategy.spares,
            step_s=pace_s,
            rungs_s=scaled,
            start_s=measured.start_s * factor,
            interval=job.every if strategy.saves else 0,
            copy_interval=5 if len(strategy.saves) > 1 else job.every if strategy.saves else 0,
            failures=failures,
            step_shares=shares,
        )
        found.append(try_on_schedule(of_schedule, policy, share=share, refill_s=REFILL_S))
    low, mid, high = found
    return SchedulePrediction(
        finish_s=mid.ended_s, low_s=low.ended_s, high_s=high.ended_s, rungs=mid.rungs
    )


def judge(
    result: StrategyResult, prediction: SchedulePrediction, paces_s: tuple[float, float]
) -> StrategyResult:
    """Return the result beside its prediction, with the reason where it is outside the band."""
    if result.finish_s is None:
        why = f"the job did not end: {result.reason}"
        return replace(result, predicted=prediction, verdict="no end", why=why)
    if prediction.low_s <= result.finish_s <= prediction.high_s:
        return replace(result, predicted=prediction, verdict="inside")
    verdict = "above" if result.finish_s > prediction.high_s else "below"
    return replace(
        result, predicted=prediction, verdict=verdict, why=_why(result, prediction, paces_s)
    )


def _why(
    result: StrategyResult, prediction: SchedulePrediction, paces_s: tuple[float, float]
) -> str:
    """Return the differences between a run and its prediction, the step's pace first."""
    pace_s = sum(paces_s) / 2
    reasons = [f"steps took {result.step_s / pace_s - 1:+.0%} against undisturbed ones"]
    if result.rungs != prediction.rungs:
        predicted = ", ".join(f"{count} {rung}" for rung, count in prediction.rungs.items())
        reasons.append(f"predicted were {predicted or 'no recoveries'}")
    count = sum(result.rungs.values())
    if count:
        reasons.append(f"a recovery took {result.recovery_s / count:.2f} s on the average")
    return "; ".join(reasons)


def digest(run_dir: Path) -> str:
    """Return the digest of the final weights that rank 0 printed; "" without one."""
    printed = [
        found
        for log in (run_dir / "logs" / "0").glob("*/stdout.log")
        for found in DIGEST.findall(log.read_text(errors="replace"))
    ]
    return printed[-1] if printed else ""


def _rungs(summary: RunSummary) -> dict[str, int]:
    taken = [
        incident.rung for incident in summary.incidents if incident.rung and not incident.drain
    ]
    return {rung: taken.count(rung) for rung in dict.fromkeys(taken)}


def _finish_s(run_dir: Path) -> float:
    """Return the time from the first step that all ranks had completed to their last one."""
    steps = [event for event in read_events(run_dir) if isinstance(event, PhaseDone)]
    steps = [event for event in steps if event.kind == "step"]
    first: dict[int, int] = {}
    for event in steps:
        first.setdefault(event.seat, event.t_ns)
    end = max(event.step for event in steps)
    last = [event.t_ns for event in steps if event.step == end]
    return (max(last) - max(first.values())) / 1e9
