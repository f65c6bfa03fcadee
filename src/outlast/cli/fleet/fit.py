"""`outlast fleet fit`."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace
from rich.padding import Padding
from rich.text import Text

from outlast.atomic_files import write_new
from outlast.cli.output_stream import Printer, echo, print_json, write
from outlast.errors import EXIT_DONE
from outlast.fleet.analysis import exposure
from outlast.fleet.analysis.fitted_rates import FittedRates
from outlast.fleet.analysis.fitted_rates import fit_rates as fitted
from outlast.fleet.analysis.rates_file import RatesSource, format_rates, lake_digest
from outlast.fleet.store.lake import Lake
from outlast.fleet.store.lake_selection import load_window
from outlast.log_records import COST_NAMES
from outlast.text_formatting import duration

SECONDS = ("repair", "queue", "window", *COST_NAMES)  # of measured values


def fit(
    lake: Path,
    /,
    *,
    out: Path | None = None,
    since: str | None = None,
    until: str | None = None,
    cluster: str | None = None,
    json: bool = False,
) -> int:
    """Measure rates of failure and repair for `outlast plan --rates`.

    Each figure has its 90 % interval, what it was counted from, and where it is
    from. Without --out the file goes to stdout.

    Parameters
    ----------
    lake
        What `outlast fleet ingest` made.
    out
        The file of rates to write; there must be none yet.
    since
        From this day or time on, as in 2024-05-01; UTC where it has no zone.
    until
        Up to, not including, this day or time.
    cluster
        Of a lake with several clusters, the one to measure; '' for records that name none.
    json
        One JSON object to stdout.
    """
    opened = Lake.open(lake)
    if out:
        write_new(out, None)
    with Printer(stderr=True).status("measuring"):
        notes: list[str] = []
        tables = load_window(opened, since, until, cluster=cluster, notes=notes)
        notes += [*exposure.dominant_attempts(tables), *exposure.inventory_notes(tables)]
        found = fitted(tables)
        found = replace(found, notes=[*notes, *found.notes])
    text = format_rates(found, RatesSource(str(lake), lake_digest(lake)))
    if out:
        write_new(out, text)
    if json:
        print_json(found)
    elif out:
        _show(found, out)
    else:
        write(text)
    return EXIT_DONE


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _show(found: FittedRates, out: Path) -> None:
    rate = found.rate
    gpu_hours = 3600 * rate.per_gpu_second
    echo(
        f"{rate.per_1000_node_days:.2f} failures in 1000 node-days: {rate.failures:,} in"
        f" {rate.node_days:,.0f} node-days of {rate.basis}"
    )
    echo(
        f"{gpu_hours:.3g} a GPU-hour, {3600 * rate.low_per_gpu_second:.3g} to"
        f" {3600 * rate.high_per_gpu_second:.3g} with 90 % if they were independent; as sure as"
        f" {rate.weight_failures:.3g} such failures"
    )
    for key, one in found.measured.items():
        format_value = duration if key in SECONDS else _plain
        band = ""
        if one.low is not None and one.high is not None:
            band = f"{format_value(one.low)} to {format_value(one.high)} with 90 %"
        echo(Text.assemble((f"{key:<12}", "bold"), f"  {format_value(one.value):<12}", f"  {band}"))
        echo(Padding(Text(f"{one.description}; counted: {one.count:,}", "dim"), (0, 0, 0, 14)))
    for note in found.notes:
        echo(Text(f"note: {note}", "yellow"))
    echo(f"written to {out}; next: outlast plan advise --gpus 16384 --rates {out}")
