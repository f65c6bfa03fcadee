"""`outlast fleet fit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash
from msgspec.structs import replace
from rich.padding import Padding
from rich.text import Text

from outlast import __version__
from outlast.atomic_files import write_new
from outlast.cli.output_stream import Printer, echo, print_json, write
from outlast.errors import EXIT_DONE, LakeError
from outlast.fleet.analysis import exposure
from outlast.fleet.analysis.confidence_intervals import CONVENTION
from outlast.fleet.analysis.failure_attribution import AFTER_S, BEFORE_S
from outlast.fleet.analysis.fitted_rates import OUTAGES, FittedRates
from outlast.fleet.analysis.fitted_rates import fit_rates as fitted
from outlast.fleet.store.lake import MANIFEST, Lake, format_time
from outlast.fleet.store.lake_selection import load_window
from outlast.log_records import COST_NAMES
from outlast.text_formatting import duration, plural

FORMAT = "outlast-rates"
VERSION = 1
Value = str | int | float


COMMENT = (
    "# Measured by `outlast fleet fit`; `outlast plan ... --rates FILE` takes [failures] and",
    "# [scenario], and what is said to it goes before them. The rest is for people.",
)


class RatesSource(NamedTuple):
    """Origin of the figures.

    `digest`: of the lake's list of files.
    """

    lake: str
    digest: str


def format_rates(rates: FittedRates, source: RatesSource) -> str:
    """Return the whole file."""
    span = f"{format_time(rates.since_ns)} to {format_time(rates.until_ns)}"
    name = Path(source.lake).name or "here"
    lines = [*COMMENT, *_lines({"format": FORMAT, "version": VERSION, "name": name})]
    lines += _table("failures", _failures(rates, span))
    lines += _table("scenario", rates.scenario)
    for key, one in rates.measured.items():
        values = {"value": one.value, "low": one.low, "high": one.high, "count": one.count}
        lines += _table(f"measured.{key}", {**values, "said": one.description})
    lines += _table("causes", {cause.cause: round(cause.share, 6) for cause in rates.causes})
    lines += _table("provenance", _provenance(rates, source, span))
    return "\n".join([*lines, ""])


def _failures(rates: FittedRates, span: str) -> dict[str, Value | None]:
    rate = rates.rate
    return {
        "per_gpu_second": rate.per_gpu_second,
        "low_per_gpu_second": rate.low_per_gpu_second,
        "high_per_gpu_second": rate.high_per_gpu_second,
        "per_1000_node_days": rate.per_1000_node_days,
        "weight_failures": rate.weight_failures,
        "failures": rate.failures,
        "node_days": rate.node_days,
        "dispersion": rate.dispersion,
        "source": f"{plural(rate.failures, 'failure')} in {rate.node_days:,.0f} node-days of"
        f" {rate.basis}, {span}",
    }


def _provenance(rates: FittedRates, source: RatesSource, span: str) -> dict[str, Value | None]:
    return {
        "lake": source.lake,
        "digest": source.digest,
        "window": span,
        "outlast": __version__,
        "failure": "an outage that began, as no job failed"
        if rates.rate.basis == OUTAGES
        else "NODE_FAIL; FAILED or REQUEUED with a finding of severity now on a node of the job"
        f" from {BEFORE_S} s before its end to {AFTER_S} s after it",
        "interval": f"90 %, of {CONVENTION}",
        "weight_failures": "failures over dispersion, the larger one by job runs or by days",
        "notes": "; ".join(rates.notes),
    }


def _table(name: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from _lines(values)


def _lines(values: Mapping[str, Value | None]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            name = (
                key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else None
            )
            yield f"{name or _quoted(key)} = {_value(value)}"


def _value(value: Value) -> str:
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _quoted(value: str) -> str:
    """Return a basic string of TOML: a JSON string with DEL escaped."""
    printed = value.encode(errors="replace").decode()  # a path may hold what no text does
    return json.dumps(printed, ensure_ascii=False).replace("\x7f", "\\u007f")


def lake_digest(lake: Path) -> str:
    """Return the digest of the lake's list of files, which identifies its content.

    Raises LakeError.
    """
    try:
        return xxhash.xxh3_128_hexdigest((lake / MANIFEST).read_bytes())
    except OSError as error:
        raise LakeError(f"{lake / MANIFEST} cannot be read: {error.strerror}") from error


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
    """Measure failure and repair rates for `outlast plan --rates`.

    Writes a TOML file in which each figure has its 90 % interval, its number of
    observations and its source.

    Parameters
    ----------
    lake
        Directory that `outlast fleet ingest` wrote.
    out
        New file for the rates (default: stdout).
    since
        Start of the period, for example 2024-05-01 (UTC without a time zone; default: the first
        record).
    until
        End of the period, exclusive (default: the last record).
    cluster
        Cluster to measure, if the lake has several; '' for records without a cluster name.
    json
        Print one JSON object.
    """
    opened = Lake.open(lake)
    if out:
        write_new(out, None)
    with Printer(stderr=True).status("measuring"):
        notes: list[str] = []
        tables = load_window(opened, since, until, cluster=cluster, notes=notes)
        notes += [*exposure.dominant_attempts(tables), *exposure.inventory_notes(tables)]
        rates = fitted(tables)
        rates = replace(rates, notes=[*notes, *rates.notes])
    text = format_rates(rates, RatesSource(str(lake), lake_digest(lake)))
    if out:
        write_new(out, text)
    if json:
        print_json(rates)
    elif out:
        _show(rates, out)
    else:
        write(text)
    return EXIT_DONE


def _plain(value: float) -> str:
    return f"{value:.3g}"


def _show(rates: FittedRates, out: Path) -> None:
    rate = rates.rate
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
    for key, one in rates.measured.items():
        format_value = duration if key in SECONDS else _plain
        band = ""
        if one.low is not None and one.high is not None:
            band = f"{format_value(one.low)} to {format_value(one.high)} with 90 %"
        echo(Text.assemble((f"{key:<12}", "bold"), f"  {format_value(one.value):<12}", f"  {band}"))
        echo(Padding(Text(f"{one.description}; counted: {one.count:,}", "dim"), (0, 0, 0, 14)))
    for note in rates.notes:
        echo(Text(f"note: {note}", "yellow"))
    echo(f"written to {out}; next: outlast plan advise --gpus 16384 --rates {out}")
