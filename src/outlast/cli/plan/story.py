"""`outlast plan story`."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from outlast.cli.output_stream import as_json, say
from outlast.cli.plan.answer_output import check_fields, remarks
from outlast.cli.plan.scenario_flags import Fields, File, Json
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan.model.answer_values import answer, format_count, format_quantity
from outlast.plan.model.ladder_costs import Strategy, matters
from outlast.plan.model.scenario import scenario_of
from outlast.plan.model.strategy_prediction import predict
from outlast.plan.narrate.narrator import NarratedRun, narrate
from outlast.plan.simulate.part_executors import interruption
from outlast.plan.simulate.simulated_job import bound_failures, job_of

_OUTCOME = {"done": "done after", "gave_up": "gave up, after", "interrupted": "not done, after"}


def story(
    file: File = None,
    /,
    *,
    to: Path,
    strategy: Strategy = "outlast",
    seed: int = 0,
    replication: int = 0,
    json: Json = False,
    **fields: Fields,
) -> int:
    """Simulate one run, and write it for `outlast explain`.

    A run directory for `outlast explain`, `summary` and `events`, decided by
    the controller that `outlast run` has. It is one of the runs of `outlast
    plan simulate` with the same seed. At 16,384 GPUs some 5 failures are told
    in a second.

    Parameters
    ----------
    to
        The run directory to write; a new one.
    strategy
        What happens after a failure; all but drop.
    seed
        The same seed and replication give the same run, byte for byte.
    replication
        Which run of that seed.
    """
    if replication < 0:
        raise UsageError(f"--replication {replication}: 0 is the first")
    if strategy == "drop":
        raise UsageError(
            "--strategy drop: the controller has no rung that goes on without a replica, so that"
            " there is nothing to tell; `outlast plan simulate` has such runs"
        )
    _must_be_new(to)
    scenario = scenario_of(check_fields(fields, story), file)
    job = bound_failures(job_of(scenario, strategy), predict(scenario, strategy))
    with interruption() as interrupted:
        narrated = narrate(job, seed=seed, replication=replication, run_dir=to, stopped=interrupted)
        code = EXIT_INTERRUPTED if interrupted() and narrated.outcome != "done" else EXIT_DONE
    if json:
        as_json({"run_dir": str(to), **narrated._asdict()})
        return code
    _show(narrated, to)
    remarks(answer("", scenario, [], [], matters(strategy) | {"step"}))
    return code


def _must_be_new(to: Path) -> None:
    try:
        if not to.exists() or (to.is_dir() and not any(to.iterdir())):
            return
    except OSError as error:
        raise UsageError(f"--to {to}: {error.strerror}; nothing was written") from error
    raise UsageError(f"--to {to} is there already; nothing was written; name a new directory")


def _show(narrated: NarratedRun, to: Path) -> None:
    tallies = narrated.tallies
    say(Text(f"{_OUTCOME[narrated.outcome]} {format_quantity(narrated.ended_s, 's')}", "bold"))
    if narrated.why:
        say(narrated.why)
    ways = ", ".join(f"{count} x {rung}" for rung, count in narrated.rungs.items())
    stops = format_count(int(tallies["incidents"]), "stop")
    say(
        f"{format_count(int(tallies['failures']), 'failure')}, {stops}"
        + (f": {ways}" if ways else "")
    )
    say(f"read it: outlast explain {to}; outlast summary {to}")
