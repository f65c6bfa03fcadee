"""Failure rates as users state them: MTBF, presets, files of `outlast fleet fit`."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from outlast import quantities
from outlast.config import read_toml
from outlast.errors import ConfigError
from outlast.theory import failures, numerics
from outlast.theory.failures import DAY_S, PRESETS, job_mtbf_s

EXACT = math.inf
# Limits of the MTBF of a GPU.
MTBF_LEAST_S = 1.0
MTBF_MOST_S = 1e6 * quantities.SECONDS["y"]
BARE_MOST = 0.05  # share of GPUs a day; a larger number without % may be a count
_FORMS = "a preset, the time between failures of one GPU (50kh), 0.5%/day, or 6.5/1000 node-days"


class StatedFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures per GPU-second that stop a job, with the source of the figure.

    `weight_failures`: the rate is as certain as if measured on so many failures (Gamma distributed
    with this shape); EXACT for one without uncertainty.
    """

    name: str
    per_gpu_s: float
    source: str
    weight_failures: float

    def at(self, probability: float) -> float:
        """Return this quantile of the rate."""
        if self.weight_failures == EXACT:
            return self.per_gpu_s
        share = numerics.gamma_quantile(self.weight_failures, probability) / self.weight_failures
        return self.per_gpu_s * share


def parse_failures(
    what: str, text: str, gpus_per_node: int, observed: float | None
) -> StatedFailures:
    """Parse a failure rate.

    `text`: a preset's name, the MTBF of a GPU as in `50kh`, a daily probability as in `0.5%/day`,
    or failures as in `6.5/1000 node-days`. `observed`: number of failures behind it; None: a preset
    is as certain as published rates agree, any other rate is exact. Raises ConfigError.
    """
    text = text.strip()
    weight = EXACT if observed is None else float(observed)
    if text in failures.PRESETS:
        prior = failures.PRESETS[text]
        return StatedFailures(
            name=text,
            per_gpu_s=prior.rate_per_device_s,
            source=prior.source,
            weight_failures=prior.weight_failures if observed is None else weight,
        )
    per_gpu_s = _rate(what, text, gpus_per_node)
    if not MTBF_LEAST_S <= 1 / per_gpu_s <= MTBF_MOST_S:
        raise ConfigError(
            f"{what!r} is a failure of one GPU every {1 / per_gpu_s:.3g} s, out of range:"
            " give 1s to 1000000y"
        )
    return StatedFailures(name=text, per_gpu_s=per_gpu_s, source="as given", weight_failures=weight)


def _rate(what: str, text: str, gpus_per_node: int) -> float:
    if day := re.fullmatch(r"(.+)/\s*(?:d|day)", text):
        probability = _positive(what, quantities.share(what, day[1]))
        if probability >= BARE_MOST and "%" not in day[1]:
            raise ConfigError(
                f"{what!r} would be {probability:.4g} of all GPUs a day: give"
                f" {100 * probability:g}%/day for that share, or 6.5/1000 node-days for a count"
            )
        if probability == 1:
            raise ConfigError(f"{what!r}: no GPU would survive a day; give a share below 100 %")
        return failures.rate_of_daily_probability(probability)
    if days := re.fullmatch(r"(.+)/\s*1,?000 ?node-?days", text):
        value = _positive(what, quantities.number(what, days[1]))
        return failures.rate_of_node_days(value, gpus_per_node)
    if not text[:1].isdigit():
        close = difflib.get_close_matches(text, failures.PRESETS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{what!r} is not a failure rate: {hint}Give {_FORMS}; presets are"
            f" {', '.join(failures.PRESETS)}"
        )
    value = quantities.measured(quantities.SECONDS, what, text, "50kh")
    return failures.rate_of_mtbf(_positive(what, value))


def _positive(what: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{what!r} must be above 0")
    return value


JOBS_GPUS = (1_024, 16_384, 131_072)


class RatePreset(msgspec.Struct, frozen=True, kw_only=True):
    """A published failure rate.

    `per_gpu_day`: failures of a GPU a day that stop a job. `job_mtbf_s`: seconds between the
    failures of a job, by its number of GPUs.
    """

    name: str
    per_gpu_day: float
    gpu_mtbf_s: float
    job_mtbf_s: dict[int, float]
    weight_failures: float
    source: str


def presets() -> list[RatePreset]:
    """Return all published rates; they differ more than tenfold."""
    return [
        RatePreset(
            name=prior.name,
            per_gpu_day=prior.rate_per_device_s * DAY_S,
            gpu_mtbf_s=1 / prior.rate_per_device_s,
            job_mtbf_s={gpus: job_mtbf_s(prior.rate_per_device_s, gpus) for gpus in JOBS_GPUS},
            weight_failures=prior.weight_failures,
            source=prior.source,
        )
        for prior in PRESETS.values()
    ]


VERSION = 1
WEIGHT_LEAST = 0.5
WEIGHT_MOST = 1e6

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class MeasuredRates(NamedTuple):
    """Rates from a file. `failures` replaces --failures; `fields`: other fields by key."""

    failures: StatedFailures
    fields: dict[str, Any]


class _Failures(msgspec.Struct, frozen=True):
    per_gpu_second: Annotated[float, msgspec.Meta(ge=1 / MTBF_MOST_S, le=1 / MTBF_LEAST_S)]
    weight_failures: Annotated[float, msgspec.Meta(ge=WEIGHT_LEAST, le=WEIGHT_MOST)]
    source: _Text


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["outlast-rates"]
    version: int
    name: _Text
    failures: _Failures
    scenario: dict[str, Any] = {}
    measured: dict[str, Any] = {}  # from here on: for readers, not computed with
    causes: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


def read_rates(path: Path) -> MeasuredRates:
    """Read the rates of a cluster from a file of `outlast fleet fit`; ignore tables for people.

    Raises ConfigError, which names the file and the field.
    """
    content = read_toml(path, "file of rates")
    try:
        file = msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        fault, _, where = str(error).partition(" - at `")
        field = where.strip("`$.")
        raise ConfigError(
            f"{path}: {field + ': ' if field else ''}{fault}; `outlast fleet fit LAKE --out FILE`"
            " writes such a file"
        ) from error
    if file.version != VERSION:
        raise ConfigError(
            f"{path}: version {file.version}; this Outlast reads version {VERSION}: measure again"
            " with `outlast fleet fit`"
        )
    rate = file.failures
    return MeasuredRates(
        StatedFailures(
            name=file.name,
            per_gpu_s=rate.per_gpu_second,
            source=rate.source,
            weight_failures=rate.weight_failures,
        ),
        file.scenario,
    )
