"""`outlast plan compare`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outlast import quantities
from outlast.cli.plan.flags import Dask, Fields, File, Json, Seed, Workers
from outlast.cli.plan.running import place, progress
from outlast.cli.plan.saying import drawn, known
from outlast.errors import EXIT_DONE, EXIT_INTERRUPTED, UsageError
from outlast.plan.measured import measured
from outlast.plan.scenario import Scenario, scenario_of, span

if TYPE_CHECKING:
    from outlast.plan.beside import Seen
    from outlast.plan.compare import Asked, Comparison

Picture = Literal["waterfall", "scale", "phases", "fan"]
REPLICATIONS_MAX = 200_000  # of each strategy: a quarter of a GB


def compare(
    file: File = None,
    /,
    *,
    start: str = "",
    by: str = "",
    within: str = "",
    run: Path | None = None,
    seed: Seed = 0,
    replications: str | None = None,
    workers: Workers = None,
    dask: Dask = None,
    json: Json = False,
    figure: Path | None = None,
    picture: Picture = "waterfall",
    **fields: Fields,
) -> int:
    """Which strategy, and what it comes to.

    All that are possible, on the same simulated failures, beside theory.

    Parameters
    ----------
    start
        When the run begins, as in 2027-01-31: the answer then has dates.
    by
        A date: how likely is the run to be done by then?
    within
        The same for a time, as in 60d.
    run
        The directory of a real run, to lay beside its prediction. Without a file, its GPUs (each a
        node and a replica of its own), which failures were transient and fatal, and what it
        measured of its recoveries, saves and steps need not be said.
    replications
        Simulated runs of each strategy, as in 1000 or 10k; if it is not said, as many as some
        seconds allow.
    figure
        Draw into this file (.svg, .png, .pdf).
    picture
        waterfall: where time goes; scale: goodput by GPUs; phases: the cheapest strategy by GPUs
        and restart time; fan: how far it will be when.
    """
    path = drawn(figure)
    seen = _seen(run) if run else None
    known(fields, compare)
    scenario = scenario_of(_with(fields, seen) if seen and not file else fields, file)
    from outlast.cli.plan.contenders import show
    from outlast.plan.compare import Asked, expected
    from outlast.plan.compare import compare as compared

    begins, deadline_s = _dates(start, by, within)
    asked = Asked(seed=seed, replications=_several(replications), start=begins, within_s=deadline_s)
    failures = expected(scenario, asked.replications)
    with place(workers, dask, failures) as where, progress("simulated") as tell:
        found = compared(scenario, asked, seen=seen, place=where, on_progress=tell)
    show(found, json=json)
    if path and found.contenders:
        _draw(picture, path, scenario, found, asked, seen)
    return EXIT_INTERRUPTED if found.interrupted else EXIT_DONE


def _draw(
    picture: Picture,
    path: Path,
    scenario: Scenario,
    found: Comparison,
    asked: Asked,
    seen: Seen | None,
) -> None:
    from outlast.plan.figures import fan, phases, scale, waterfall

    if picture == "scale":
        scale.draw(scenario, path, asked.seed)
    elif picture == "phases":
        phases.draw(scenario, path)
    elif picture == "fan":
        fan.draw(scenario, found, path, start=asked.start, seen=seen)
    else:
        waterfall.draw(scenario, found, path)


def _several(replications: str | None) -> int | None:
    if replications is None:
        return None
    runs = quantities.count(f"--replications {replications}", replications)
    if not 1 <= runs <= REPLICATIONS_MAX:
        raise UsageError(f"--replications {replications}: from 1 to {REPLICATIONS_MAX:,}")
    return runs


def _seen(run_dir: Path) -> Seen:
    from outlast.plan.beside import seen

    return seen(run_dir)


def _with(fields: dict[str, str], seen: Seen) -> dict[str, str]:
    """Return what was said, and what the run says of what was not; a file of rates goes before the
    run."""
    summary, said = seen.summary, {name.replace("_", "-") for name in fields}
    rates = fields.get("rates", "none").strip()
    if rates not in ("", "none"):
        said |= set(measured(Path(rates)).said) - {"gpus-per-node"}
    own = dict(seen.fields)
    if "gpus" not in said:
        own |= {"gpus": f"{summary.world}", "gpus-per-node": "1", "replica-gpus": "1"}
    if seen.failures and not said & {"transient", "fatal"}:
        own |= {"transient": f"{seen.transient:.6f}", "fatal": f"{seen.fatal:.6f}"}
    return {**{key: text for key, text in own.items() if key not in said}, **fields}


def _dates(start: str, by: str, within: str) -> tuple[datetime | None, float | None]:
    """When the run begins, and in how many seconds it is to be done. Raises UsageError."""
    if by and within:
        raise UsageError("--by and --within say the same: give one of them")
    begins = _date("--start", start) if start else None
    if within:
        return begins, span(f"--within {within}", within)
    if not by:
        return begins, None
    if begins is None:
        raise UsageError(f"--by {by} needs --start: when does the run begin?")
    try:
        deadline_s = (_date("--by", by) - begins).total_seconds()
    except TypeError as error:
        raise UsageError("--start and --by: give both a time zone, or neither") from error
    if deadline_s <= 0:
        raise UsageError(f"--by {by} is not after --start {start}")
    return begins, deadline_s


def _date(flag: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text} is no date, as in 2027-01-31") from error
