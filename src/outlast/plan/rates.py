"""How often a GPU fails, as people say it, and how sure that is."""

from __future__ import annotations

import difflib
import math
import re

import msgspec

from outlast import quantities
from outlast.errors import ConfigError
from outlast.theory import failures, gamma

EXACT = math.inf
MTBF_LEAST_S, MTBF_MOST_S = 1.0, 1e6 * quantities.SECONDS["y"]  # of a GPU
BARE_MOST = 0.05  # a share of GPUs a day without %: above it a count was meant
_FORMS = "a preset, the time between failures of one GPU (50kh), 0.5%/day, or 6.5/1000 node-days"


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Failures per GPU-second that stop a job, and where the figure is from.

    `weight_failures`: the rate is as sure as if it had been measured on so many failures (Gamma
    distributed with this shape); EXACT for one that is to be taken as it is.
    """

    name: str
    per_gpu_s: float
    source: str
    weight_failures: float

    def at(self, probability: float) -> float:
        """The rate that the true one is below with this probability."""
        if self.weight_failures == EXACT:
            return self.per_gpu_s
        share = gamma.quantile(self.weight_failures, probability) / self.weight_failures
        return self.per_gpu_s * share


def failures_of(what: str, text: str, gpus_per_node: int, seen: int | None) -> Failures:
    """`text` is a preset's name, the MTBF of a GPU as in `50kh`, a daily probability as in
    `0.5%/day`, or failures as in `6.5/1000 node-days`. `seen`: how many failures it was measured
    on; None: a preset is as sure as published rates agree, any other is exact. Raises ConfigError.
    """
    text = text.strip()
    weight = EXACT if seen is None else float(seen)
    if text in failures.PRESETS:
        prior = failures.PRESETS[text]
        return Failures(
            name=text, per_gpu_s=prior.rate_per_device_s, source=prior.source,
            weight_failures=prior.weight_failures if seen is None else weight,
        )  # fmt: skip
    per_gpu_s = _rate(what, text, gpus_per_node)
    if not MTBF_LEAST_S <= 1 / per_gpu_s <= MTBF_MOST_S:
        raise ConfigError(
            f"{what!r} is a failure of one GPU every {1 / per_gpu_s:.3g} s, which cannot be meant:"
            " say from 1s to 1000000y"
        )
    return Failures(name=text, per_gpu_s=per_gpu_s, source="as given", weight_failures=weight)


def _rate(what: str, text: str, gpus_per_node: int) -> float:
    if day := re.fullmatch(r"(.+)/\s*(?:d|day)", text):
        probability = _positive(what, quantities.share(what, day[1]))
        if probability >= BARE_MOST and "%" not in day[1]:
            raise ConfigError(
                f"{what!r} would be {probability:.4g} of all GPUs a day: say {100 * probability:g}%"
                "/day where that is meant, and 6.5/1000 node-days for a count"
            )
        if probability == 1:
            raise ConfigError(f"{what!r}: no GPU lives for a day; say a share below 100 %")
        return failures.rate_of_daily_probability(probability)
    if days := re.fullmatch(r"(.+)/\s*1,?000 ?node-?days", text):
        found = _positive(what, quantities.number(what, days[1]))
        return failures.rate_of_node_days(found, gpus_per_node)
    if not text[:1].isdigit():
        close = difflib.get_close_matches(text, failures.PRESETS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"{what!r} is no failure rate: {hint}Say {_FORMS}; presets are"
            f" {', '.join(failures.PRESETS)}"
        )
    found = quantities.measured(quantities.SECONDS, what, text, "50kh")
    return failures.rate_of_mtbf(_positive(what, found))


def _positive(what: str, value: float) -> float:
    if not value > 0:
        raise ConfigError(f"{what!r} must be above 0")
    return value
