"""The file of rates that `outlast fleet fit` writes, for `outlast plan --rates`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from outlast import __version__
from outlast.errors import LakeError
from outlast.fleet.analysis.confidence_intervals import CONVENTION
from outlast.fleet.analysis.failure_attribution import AFTER_S, BEFORE_S
from outlast.fleet.analysis.fitted_rates import OUTAGES, FittedRates
from outlast.fleet.lake import MANIFEST, format_time
from outlast.text_formatting import plural

FORMAT = "outlast-rates"
VERSION = 1
Value = str | int | float
COMMENT = (
    "# Measured by `outlast fleet fit`; `outlast plan ... --rates FILE` takes [failures] and",
    "# [scenario]; its flags take precedence. The other tables are for people.",
)


class RatesSource(NamedTuple):
    """Origin of the figures. `digest`: of the lake's list of files."""

    lake: str
    digest: str


def format_rates(rates: FittedRates, source: RatesSource) -> str:
    """Return the whole file."""
    span = f"{format_time(rates.since_ns)} to {format_time(rates.until_ns)}"
    name = Path(source.lake).name or "here"
    lines = [*COMMENT, *_toml_lines({"format": FORMAT, "version": VERSION, "name": name})]
    lines += _toml_table("failures", _failure_values(rates, span))
    lines += _toml_table("scenario", rates.scenario)
    for key, one in rates.measured.items():
        values = {"value": one.value, "low": one.low, "high": one.high, "count": one.count}
        lines += _toml_table(f"measured.{key}", {**values, "said": one.description})
    lines += _toml_table("causes", {cause.cause: round(cause.share, 6) for cause in rates.causes})
    lines += _toml_table("provenance", _provenance_values(rates, source, span))
    return "\n".join([*lines, ""])


def _failure_values(rates: FittedRates, span: str) -> dict[str, Value | None]:
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


def _provenance_values(
    rates: FittedRates, source: RatesSource, span: str
) -> dict[str, Value | None]:
    return {
        "lake": source.lake,
        "digest": source.digest,
        "window": span,
        "outlast": __version__,
        "failure": "start of an outage, since no job failed"
        if rates.rate.basis == OUTAGES
        else "NODE_FAIL; FAILED or REQUEUED with a finding of severity now on a node of the job"
        f" from {BEFORE_S} s before its end to {AFTER_S} s after it",
        "interval": f"90 %, of {CONVENTION}",
        "weight_failures": "failures over dispersion, the larger one by job runs or by days",
        "notes": "; ".join(rates.notes),
    }


def _toml_table(name: str, values: Mapping[str, Value | None]) -> Iterator[str]:
    yield ""
    yield f"[{name}]"
    yield from _toml_lines(values)


def _toml_lines(values: Mapping[str, Value | None]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            name = (
                key if key.replace("-", "").replace("_", "").isalnum() and key.isascii() else None
            )
            yield f"{name or _toml_text(key)} = {_toml_value(value)}"


def _toml_value(value: Value) -> str:
    if isinstance(value, str):
        return _toml_text(value)
    return repr(value)


def _toml_text(value: str) -> str:
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
