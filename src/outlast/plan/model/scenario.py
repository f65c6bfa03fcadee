"""Scenario: the cluster and the run, one flat record from flags or a TOML file.

FIELDS is the single list of fields, with their defaults.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from outlast import quantities
from outlast.config import read_toml
from outlast.errors import ConfigError
from outlast.plan.model.rates import MeasuredRates, StatedFailures, parse_failures, read_rates
from outlast.theory import numerics, spares

NEVER_S = math.inf
REPLICA_GPUS = 512
SHARES_CLOSE = 1e-6  # of rounding, in files that were measured
SPAN_MAX_S = 1000 * quantities.SECONDS["y"]
IN_REPAIR_MAX = spares.MEAN_MAX / 10  # on the average; the ends of a band are some times as far

Overheads: TypeAlias = tuple[tuple[str, float], ...]  # by strategy
OVERHEAD_OF = ("checkpoint-restart", "peer-memory", "migrate", "drop", "outlast")
OVERHEAD_MAX = 0.99


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster and run in seconds, bytes and dollars. `assumed`: fields left to their defaults."""

    gpus: int
    gpus_per_node: int
    failures: StatedFailures
    transient: float
    fatal: float
    rack_nodes: int
    rack_mtbf_s: float
    lemons: float
    lemon_factor: float
    shape: float
    age_s: float
    gap_spread: float | None
    spares: int | None
    repair_s: float
    work_s: float
    step_s: float
    replicas: int
    interval_s: float | None
    cost_s: float
    flush_s: float
    drag: float
    memory_interval_s: float | None
    memory_cost_s: float
    copies: int
    window_s: float
    detect_s: float
    restart_s: float
    restore_s: float
    pause_s: float
    overhead: Overheads
    usd_per_gpu_hour: float
    state_bytes: float
    assumed: frozenset[str] = frozenset()

    @property
    def nodes(self) -> int:
        """Number of nodes of the job."""
        return self.gpus // self.gpus_per_node


class Field(NamedTuple):
    """Field with its flag and file `key`, its attribute `name`, and `default` ("" if required)."""

    key: str
    name: str
    read: Callable[[str, str], Any]
    default: str
    group: str
    description: str


def span(what: str, text: str) -> float:
    """Parse seconds; 0 is allowed. Raises ConfigError as `quantities.measured`."""
    if text == "0":
        return 0.0
    value = quantities.measured(quantities.SECONDS, what, text, "30min")
    if value > SPAN_MAX_S:
        raise ConfigError(f"{what!r} is longer than 1000y, the limit")
    return value


def overheads(what: str, text: str) -> Overheads:
    """Parse strategies and the share of time that they always take more. Raises ConfigError."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        if name not in OVERHEAD_OF or name in shares:
            known = ", ".join(OVERHEAD_OF)
            raise ConfigError(f"{what!r}: give each of {known} once, as in drop=4%,outlast=1%")
        if (value := quantities.share(what, share)) > OVERHEAD_MAX:
            raise ConfigError(f"{what!r}: {share} is more than {OVERHEAD_MAX:.0%}")
        shares[name] = value
    return tuple(sorted(shares.items()))


def _unless(word: str, value: object, read: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    return lambda what, text: value if text == word else read(what, text)


_CLUSTER, _RUN, _SAVES, _RECOVERY, _PRICE = "Cluster", "Run", "Saves", "Recovery", "Price"
_text = _unless("", "", lambda _, text: text)
# fmt: off
FIELDS = (
    Field("gpus", "gpus", quantities.count, "", _CLUSTER,
          "GPUs that the job needs, as in 16384 or 100k"),
    Field("gpus-per-node", "gpus_per_node", quantities.count, "8", _CLUSTER,
          "GPUs that fail and are replaced together"),
    Field("failures", "failures", _text, "llama3-405b", _CLUSTER,
          "a preset, a GPU's MTBF as in 50kh, 0.5%/day, or 6.5/1000 node-days"),
    Field("rates", "rates", _unless("none", None, lambda _, text: Path(text)), "none", _CLUSTER,
          "file of `outlast fleet fit`: its measured failures and other fields, unless given here"),
    Field("failures-seen", "seen", _unless("preset", None, quantities.number), "preset", _CLUSTER,
          "number of failures behind the rate, which determines the bands"),
    Field("transient", "transient", quantities.share, "20%", _CLUSTER,
          "share of all failures after which the node itself continues"),
    Field("fatal", "fatal", quantities.share, "1%", _CLUSTER,
          "share of all failures after which only storage is left; the rest take a node"),
    Field("rack-nodes", "rack_nodes", quantities.count, "8", _CLUSTER,
          "nodes in a rack"),
    Field("rack-mtbf", "rack_mtbf_s", _unless("never", NEVER_S, span), "never", _CLUSTER,
          "mean time between failures of one whole rack"),
    Field("lemons", "lemons", quantities.share, "0%", _CLUSTER,
          "share of nodes that fail more often"),
    Field("lemon-factor", "lemon_factor", quantities.number, "10", _CLUSTER,
          "failure rate of these nodes, as a multiple of the others'"),
    Field("shape", "shape", quantities.number, "1", _CLUSTER,
          "Weibull shape of a node's life; below 1: infant mortality, 1: no ageing"),
    Field("age", "age_s", span, "0", _CLUSTER,
          "age of all nodes at the start, if they age"),
    Field("gap-spread", "gap_spread", _unless("random", None, quantities.share), "random", _CLUSTER,
          "gaps between failures: uniform around their mean, as in 25%; random: Poisson"),
    Field("spares", "spares", _unless("enough", None, quantities.count), "enough", _CLUSTER,
          "spare nodes; enough: as many as are in repair 99.9 % of the time, none for drop"),
    Field("repair", "repair_s", span, "24h", _CLUSTER,
          "time until a failed node is repaired"),
    Field("work", "work_s", span, "30d", _RUN,
          "time of the run without failures and saves"),
    Field("step", "step_s", span, "10s", _RUN,
          "time of one training step"),
    Field("replica-gpus", "replica_gpus", _unless("default", None, quantities.count),
          "default", _RUN, f"GPUs that together hold one replica; default: about {REPLICA_GPUS}"),
    Field("state", "state_bytes", quantities.size, "1.5TB", _RUN,
          "size of parameters and optimizer of one replica"),
    Field("interval", "interval_s", _unless("best", None, span), "best", _SAVES,
          "work between two durable saves"),
    Field("cost", "cost_s", span, "5s", _SAVES,
          "time that a durable save blocks"),
    Field("flush", "flush_s", span, "2min", _SAVES,
          "time from the end of a durable save until it can be restored"),
    Field("drag", "drag", quantities.share, "0%", _SAVES,
          "share by which steps are slower during the flush"),
    Field("memory-interval", "memory_interval_s", _unless("best", None, span), "best", _SAVES,
          "work between two versions in memory"),
    Field("memory-cost", "memory_cost_s", span, "1s", _SAVES,
          "time that a version in memory blocks"),
    Field("copies", "copies", _unless("default", None, quantities.count), "default", _SAVES,
          "nodes that hold each part of a version in memory; default: 2, or the next that divides"),
    Field("window", "window_s", span, "1min", _SAVES,
          "time from a recovery until every part has all its copies again"),
    Field("detect", "detect_s", span, "30s", _RECOVERY,
          "time from a failure until it is detected"),
    Field("restart", "restart_s", span, "10min", _RECOVERY,
          "restart of the whole job from storage"),
    Field("restore", "restore_s", span, "2min", _RECOVERY,
          "restore of the whole job from memory"),
    Field("pause", "pause_s", span, "30s", _RECOVERY,
          "time until live replicas continue, with or without a spare"),
    Field("overhead", "overhead", _unless("none", (), overheads), "none", _RECOVERY,
          "overhead as a share of steps' time, as in drop=4%,outlast=1%"),
    Field("gpu-hour", "usd_per_gpu_hour", quantities.price, "$2.50", _PRICE,
          "price of a GPU-hour"),
)
# fmt: on
_ABOVE_0 = {
    "gpus",
    "gpus-per-node",
    "failures-seen",
    "rack-nodes",
    "rack-mtbf",
    "lemon-factor",
    "shape",
    "repair",
    "work",
    "step",
    "interval",
    "memory-interval",
    "copies",
    "gpu-hour",
}  # fmt: skip
_LIMITS = {
    "gpus": (1, 1e9),
    "failures-seen": (0.5, 1e6),  # as sure as the rate is exact
    "lemon-factor": (0, 1e6),
    "shape": (numerics.SHAPE_MIN, 100),
    "state": (1, 1e18),
    "gpu-hour": (0, 1e6),
}
KEYS = {field.key: field for field in FIELDS}
_RATE = ("failures", "failures-seen")


def scenario_of(flags: Mapping[str, str], file: Path | None = None) -> Scenario:
    """Return a scenario from `flags` (key to text), which override those in a TOML `file`.

    Precedence: flags, --rates, keys of `file`, rates that `file` names. Raises ConfigError with the
    field, the file, and the likely spelling.
    """
    texts, where, rate = _layers(flags, file)
    values: dict[str, Any] = {}
    for field in FIELDS:
        values[field.name] = _value(field, where[field.key], texts.get(field.key))
    per_node, observed, _ = values["gpus_per_node"], values.pop("seen"), values.pop("rates")
    if values["gpus"] % per_node:
        raise ConfigError(
            f"{values['gpus']:,} gpus are not a multiple of {per_node} (gpus-per-node)"
        )
    text = values["failures"]
    values["failures"] = (
        parse_failures(f"{where['failures']} {text}", text, per_node, observed)
        if rate is None
        else rate
        if observed is None
        else msgspec.structs.replace(rate, weight_failures=float(observed))
    )
    nodes = values["gpus"] // per_node
    values["replicas"] = _replicas(nodes, per_node, values.pop("replica_gpus"))
    if values["copies"] is None:
        values["copies"] = _copies(nodes)
    given = {*texts, *_RATE} if rate else set(texts)
    scenario = Scenario(**values, assumed=frozenset(KEYS) - given)
    _check(scenario)
    return scenario


def resize(scenario: Scenario, gpus: int) -> Scenario:
    """Return the scenario with other GPUs and its defaults computed anew. Raises ConfigError."""
    nodes, replica_gpus = gpus // scenario.gpus_per_node, scenario.gpus // scenario.replicas
    replicas = _replicas(
        nodes, scenario.gpus_per_node, None if "replica-gpus" in scenario.assumed else replica_gpus
    )
    copies = _copies(nodes) if "copies" in scenario.assumed else scenario.copies
    sized = msgspec.structs.replace(scenario, gpus=gpus, replicas=replicas, copies=copies)
    _check(sized)
    return sized


def _value(field: Field, where: str, given: str | None) -> Any:
    """Parse the text of a field, or return its default. Raises ConfigError."""
    text = field.default if given is None else given
    if not text:
        raise ConfigError(
            f"{field.key} is not given; pass --{field.key}, or set {field.key} in a file"
            if given is None
            else f"{where} is empty"
        )
    value = field.read(f"{where} {text}", text)
    if field.key in _ABOVE_0 and value == 0:
        raise ConfigError(f"{where} must be above 0")
    least, most = _LIMITS.get(field.key, (0, math.inf))
    if value is not None and field.key in _LIMITS and not least <= value <= most:
        raise ConfigError(f"{where} {text} is out of range: {least:g} to {most:g}")
    return value


def default_text(scenario: Scenario, field: Field) -> str:
    """Return the default of an unset field as text that would set it."""
    follows = {"copies": scenario.copies, "replica-gpus": scenario.gpus // scenario.replicas}
    return str(follows[field.key]) if field.key in follows else field.default


def _check(scenario: Scenario) -> None:
    """Check constraints between fields. Raises ConfigError."""
    nodes, interval_s, rate = scenario.nodes, scenario.interval_s, scenario.failures
    if interval_s is not None and interval_s > scenario.work_s:
        raise ConfigError("--interval is longer than --work: no save would begin")
    if scenario.flush_s > scenario.work_s:
        raise ConfigError("--flush is longer than --work: no save would complete")
    if scenario.step_s > scenario.work_s and "step" not in scenario.assumed:
        raise ConfigError("--step is longer than --work: the run would have no step")
    if interval_s is not None and scenario.flush_s > interval_s:
        raise ConfigError("--flush is longer than --interval: a save must end before the next")
    if scenario.memory_interval_s and scenario.memory_interval_s > (interval_s or scenario.work_s):
        raise ConfigError("--memory-interval is longer than --interval")
    if (both := scenario.transient + scenario.fatal) > 1 + SHARES_CLOSE:
        raise ConfigError(
            f"--transient and --fatal are shares of the same failures, and sum to {both:.4%}: at"
            " most 100 %; the rest take a node"
        )
    if scenario.spares is not None and scenario.spares > nodes:
        raise ConfigError(f"--spares {scenario.spares:,} is more than the {nodes:,} nodes")
    failing = rate.per_gpu_s * scenario.gpus + 1 / scenario.rack_mtbf_s * nodes
    if failing * scenario.repair_s > IN_REPAIR_MAX:
        raise ConfigError(
            f"--failures {rate.name} and --repair put {failing * scenario.repair_s:.3g} nodes into"
            f" repair at once: at most {IN_REPAIR_MAX:,.0f}"
        )
    if nodes % scenario.copies:
        raise ConfigError(f"--copies {scenario.copies} must divide the {nodes:,} nodes")


def read_file(path: Path) -> dict[str, str]:
    """Read a TOML file with the fields as top-level keys, as key to text. Raises ConfigError."""
    return _texts(path, read_toml(path, "scenario"))


def _layers(
    flags: Mapping[str, str], file: Path | None
) -> tuple[dict[str, str], dict[str, str], StatedFailures | None]:
    """Return texts and sources by key; a file of rates overrides. Raises ConfigError."""
    merged: dict[str, str] = {}
    where = {key: f"--{key}" for key in KEYS}
    rate: StatedFailures | None = None
    filed = (read_file(file), f"{file}: ") if file else ({}, "")
    for texts, place in (filed, (_known_fields(flags, "flag --"), "--")):
        name = texts.get("rates", "none")
        if name not in ("", "none"):
            path = file.parent / name if file and place != "--" else Path(name)
            rates = _measured(path, f"{place}rates")
            rate = rates.failures
            merged = {key: text for key, text in merged.items() if key not in _RATE}
            merged |= _texts(path, rates.fields)
            where |= {key: f"{path}: {key}" for key in rates.fields}
        if "failures" in texts:
            rate = None
        merged |= texts
        where |= {key: f"{place}{key}" for key in texts}
    return merged, where, rate


def _measured(path: Path, where: str) -> MeasuredRates:
    try:
        return read_rates(path)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _texts(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in fields.items():
        try:
            texts[key] = _text_of(f"{path}: {key}", value)
        except ValueError as error:  # a number of thousands of digits
            raise ConfigError(f"{path}: {error}") from error
    return _known_fields(texts, f"{path}: key ")


def _text_of(where: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        key = where.rpartition(" ")[2]
        raise ConfigError(f'{where} must be a string or a number, as in {key} = "5min"')
    return str(value)


def _known_fields(given: Mapping[str, str], where: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, text in given.items():
        key = name.replace("_", "-")
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            dashes = "--" if where.endswith("--") else ""
            hint = f"did you mean {dashes}{close[0]}?" if close else f"known are {', '.join(KEYS)}"
            raise ConfigError(f"{where}{name} is unknown: {hint}")
        if key in texts:
            raise ConfigError(f"{where}{name} is given twice")
        texts[key] = text.strip()
    return texts


def _copies(nodes: int) -> int:
    return next((copies for copies in (2, 3, 5, 7) if nodes % copies == 0), 1)


def _replicas(nodes: int, gpus_per_node: int, replica_gpus: int | None) -> int:
    if replica_gpus is None:
        wanted = nodes * gpus_per_node / REPLICA_GPUS
        pairs = ((low, nodes // low) for low in range(1, math.isqrt(nodes) + 1) if nodes % low == 0)
        divisors = [divisor for pair in pairs for divisor in pair if divisor > 1]
        return min(divisors, key=lambda divisor: abs(math.log(divisor / wanted)), default=1)
    if not replica_gpus or (nodes * gpus_per_node) % replica_gpus or replica_gpus % gpus_per_node:
        raise ConfigError(
            f"--replica-gpus {replica_gpus} must divide {nodes * gpus_per_node:,} gpus into whole"
            f" nodes of {gpus_per_node}"
        )
    return nodes * gpus_per_node // replica_gpus
