"""`outlast demo`: a small GPT trained with four injected faults, and undisturbed."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import msgspec
from rich.text import Text

from outlast import config
from outlast.cli.output_stream import Printer, print_json
from outlast.errors import EXIT_DONE, EXIT_GAVE_UP, OutlastError, RunDirError, UsageError
from outlast.events import FaultInjected
from outlast.telemetry.event_store import Losses, bit_texts, read_events, reported_losses
from outlast.telemetry.run_summary import RunSummary, summarise
from outlast.telemetry.summary_tables import render
from outlast.terminal_tables import number_column, table, text_column
from outlast.text_formatting import duration, percentage, plural

DIGEST = re.compile(r"^parameters sha256 ([0-9a-f]{64})$", re.MULTILINE)
WORLD, SPARES, STEPS_MIN = 4, 1, 20
DEADLINE_S = 900.0  # of one training; the whole demo is meant to stay under 240
FAULTS = (
    (0.2, "kill:rank=2,step={step},phase=backward"),
    (0.4, "stop:rank=1,step={step}"),
    (0.6, "raise:rank=3,step={step},phase=forward"),
    (0.8, "kill:rank=0,step={step},phase=apply"),
)  # at which share of the steps, and what


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `--json`. `figure` is "" where matplotlib is missing."""

    version: int = 1
    comparison: TwinComparison
    disturbed: RunSummary
    undisturbed: RunSummary
    figure: str
    wall_s: float


def demo(*, run_dir: Path | None = None, steps: int = 150, json: bool = False) -> int:
    """Train a small GPT with injected faults, and compare it with an undisturbed run.

    Exit code 0: all losses and the final parameters are equal to the last bit, no
    committed step was lost, and all four faults were injected.

    Parameters
    ----------
    run_dir
        Directory for both runs and `report.svg` (default: a new directory under `runs/`).
    steps
        Number of training steps, at least 20.
    json
        Print one JSON object on stdout at the end, and all other output on stderr.
    """
    if steps < STEPS_MIN:
        raise UsageError(
            f"--steps {steps}: the demo needs at least {STEPS_MIN} steps for its four faults"
        )
    began = time.monotonic()
    folder = run_dir or config.run_dir_default() / time.strftime("demo-%Y%m%d-%H%M%S")
    disturbed, undisturbed = folder / "disturbed", folder / "undisturbed"
    if disturbed.exists() or undisturbed.exists():
        raise RunDirError(
            f"{folder} holds a demo already; nothing was started; give another --run-dir"
        )
    console = Printer(stderr=json)
    specs = [spec.format(step=max(2, round(part * steps))) for part, spec in FAULTS]
    console.rule(f"1/2  {steps} steps, {WORLD} ranks, {SPARES} spare, {len(specs)} faults")
    for spec in specs:
        console.print(f"  --fault {spec}")
    faults = [argument for spec in specs for argument in ("--fault", spec)]
    _train(disturbed, steps, [f"--spares={SPARES}", *faults], json=json)
    console.rule("2/2  the same training, undisturbed")
    _train(undisturbed, steps, [], json=json)

    report = DemoReport(
        comparison=compare(disturbed, undisturbed, faults=len(specs)),
        disturbed=summarise(disturbed),
        undisturbed=summarise(undisturbed),
        figure=_figure(folder, disturbed, undisturbed, console),
        wall_s=time.monotonic() - began,
    )
    console.rule("the disturbed run")
    render(report.disturbed, console)
    _show(report, console)
    if json:
        print_json(report)
    return EXIT_DONE if report.comparison.equal else EXIT_GAVE_UP


def example() -> Path:
    """Return the script that is trained: the source checkout's, else the copy in the installed
    wheel."""
    checkout = Path(__file__).parents[3] / "examples" / "train_gpt.py"
    installed = Path(str(resources.files("outlast"))) / "examples" / "train_gpt.py"
    for path in (installed, checkout):
        if path.is_file():
            return path
    raise UsageError(f"neither {installed} nor {checkout} exists: reinstall outlast")


def _train(run_dir: Path, steps: int, flags: list[str], *, json: bool) -> None:
    """Run `outlast run` on the example, as a user would. Raises OutlastError for a bad end."""
    command = [
        *(sys.executable, "-m", "outlast", "run", f"--nproc-per-node={WORLD}"),
        *(f"--run-dir={run_dir}", *flags, *(["--plain"] if json else [])),
        *(str(example()), f"--steps={steps}"),
    ]
    process = subprocess.Popen(command, stdout=sys.stderr if json else None)
    try:
        code = _ended(process)
    except BaseException:  # Ctrl-C too: the launcher gets the time that it takes to stop cleanly
        process.terminate()
        limits = config.Limits()
        process.wait(limits.stop_s + limits.kill_s + 10)
        raise
    if code:
        raise OutlastError(
            f"the run in {run_dir} ended with exit code {code}; its events and logs were kept:"
            f" outlast explain {run_dir}"
        )


def _ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise OutlastError(
            f"a training of the demo did not end within {DEADLINE_S:.0f} s, on a slow or busy"
            " machine; it is being stopped; its files are kept"
        ) from error


def _figure(folder: Path, disturbed: Path, undisturbed: Path, console: Printer) -> str:
    try:
        from outlast.telemetry.run_figure import report
    except ModuleNotFoundError as error:
        console.print(f"no figure: {error.name} is missing; pip install 'outlast[figures]'")
        return ""
    path = folder / "report.svg"
    report([(undisturbed, "undisturbed"), (disturbed, "disturbed")], path)
    return str(path)


def _show(report: DemoReport, console: Printer) -> None:
    comparison = report.comparison
    figures = map(number_column, ("disturbed", "undisturbed"))
    grid = table(text_column(), *figures, text_column(), title="to the last bit")
    same, sound = (
        (Text("equal", "green"), Text("DIFFERS", "bold red")),
        (Text(), Text("NOT SO", "bold red")),
    )
    for name, disturbed, undisturbed, good, marks in (
        ("committed steps", *map(str, comparison.steps), comparison.steps_equal, same),
        ("losses reported", *map(str, comparison.losses), comparison.losses_equal, same),
        (
            "largest difference",
            f"{comparison.loss_difference_max:g}",
            "",
            comparison.losses_equal,
            same,
        ),
        (
            "parameters sha256",
            *(d[:16] for d in comparison.digests),
            comparison.digests_equal,
            same,
        ),
        (
            "faults that occurred",
            *map(str, (comparison.faults_struck, comparison.twin_struck)),
            comparison.all_struck,
            sound,
        ),
        (
            "committed steps lost",
            *(str(run.committed_steps_lost) for run in (report.disturbed, report.undisturbed)),
            comparison.none_lost,
            sound,
        ),
        (
            "wall",
            duration(report.disturbed.wall_s),
            duration(report.undisturbed.wall_s),
            True,
            sound,
        ),
        ("ETTR", _share(report.disturbed.ettr), _share(report.undisturbed.ettr), True, sound),
    ):
        grid.add_row(name, disturbed, undisturbed, marks[not good])
    console.print()
    console.print(grid)
    broken = plural(len(report.disturbed.incidents), "incident")
    verdict = "equal to the last bit" if comparison.equal else "NOT equal"
    story = f"details: outlast explain {report.disturbed.run_dir}"
    took = f" after {broken}; the demo took {duration(report.wall_s)}; {story}"
    console.print(Text.assemble("\n", (verdict, "bold"), took), soft_wrap=True)
    if report.figure:
        console.print(f"the figure: {report.figure}", soft_wrap=True)


def _share(part: float | None) -> str:
    return "" if part is None else percentage(part)


class TwinComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of a disturbed run with its twin; pairs are (disturbed, undisturbed).

    `loss_difference_max` is infinite where a loss is missing on one side.
    """

    steps: tuple[int, int]
    losses: tuple[int, int]
    loss_difference_max: float
    losses_equal: bool
    digests: tuple[str, str]
    faults_asked: int
    faults_struck: int
    twin_struck: int  # must be 0, or it is no undisturbed twin
    committed_steps_lost: int

    @property
    def steps_equal(self) -> bool:
        """True if both runs committed the same number of steps."""
        return self.steps[0] == self.steps[1]

    @property
    def digests_equal(self) -> bool:
        """True if both runs printed the same digest."""
        return self.digests[0] == self.digests[1] != ""

    @property
    def all_struck(self) -> bool:
        """True if every injected fault occurred in the run, and none in the twin."""
        return self.faults_struck == self.faults_asked and not self.twin_struck

    @property
    def none_lost(self) -> bool:
        """True if no committed step was lost."""
        return self.committed_steps_lost == 0

    @property
    def equal(self) -> bool:
        """True if nothing differs, nothing was lost, and at least one fault was survived."""
        same = self.steps_equal and self.losses_equal and self.digests_equal
        return same and self.none_lost and self.all_struck


def compare(disturbed: Path, undisturbed: Path, *, faults: int) -> TwinComparison:
    """Compare the run in `disturbed`, in which `faults` were injected, with its twin."""
    ours, theirs = reported_losses(disturbed), reported_losses(undisturbed)
    summaries = summarise(disturbed), summarise(undisturbed)
    return TwinComparison(
        steps=(summaries[0].steps or 0, summaries[1].steps or 0),
        losses=(len(ours), len(theirs)),
        loss_difference_max=difference_max(ours, theirs),
        losses_equal=bool(theirs) and bit_texts(ours) == bit_texts(theirs),
        digests=(_digest(disturbed), _digest(undisturbed)),
        faults_asked=faults,
        faults_struck=len(_injected_faults(disturbed)),
        twin_struck=len(_injected_faults(undisturbed)),
        committed_steps_lost=summaries[0].committed_steps_lost or 0,
    )


def difference_max(ours: Losses, theirs: Losses) -> float:
    """Return the largest |left - right|; infinite where one side has a number that the other has
    not."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max((abs(ours[key] - theirs[key]) for key in ours), default=0.0)


def _injected_faults(run_dir: Path) -> set[str]:
    return {event.spec for event in read_events(run_dir) if isinstance(event, FaultInjected)}


def _digest(run_dir: Path) -> str:
    """Return the digest that rank 0 printed at its end, from whichever worker held rank 0 then."""
    printed = [
        digest
        for log in (run_dir / "logs" / "0").glob("*/stdout.log")
        for digest in DIGEST.findall(log.read_text(errors="replace"))
    ]
    return printed[-1] if printed else ""
