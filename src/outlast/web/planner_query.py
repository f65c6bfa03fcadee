"""Query of the planner's page: fields of a scenario, a strategy, and the axis of its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from outlast.errors import ConfigError
from outlast.plan.model.ladder_costs import STRATEGIES, Strategy
from outlast.plan.model.scenario import FIELDS, Scenario, scenario_of

CurveAxis: TypeAlias = Literal["gpus", "failures"]
T = TypeVar("T")
AXES: tuple[CurveAxis, ...] = get_args(CurveAxis)
PAIRS_MAX = 64
TEXT_MAX = 64  # characters of a value
GPUS = "16384"
STRATEGY: Strategy = "outlast"
_SLOW = "takes seconds to compute; `outlast plan compare` has it"
REFUSED_FIELDS = {  # with the reason
    "rates": "names a file; give its failures, or use `outlast plan compare --rates`",
    "rack-mtbf": _SLOW,
    "rack-nodes": _SLOW,
}
PLANNER_FIELDS = tuple(field for field in FIELDS if field.key not in REFUSED_FIELDS)
PLANNER_KEYS = frozenset({"strategy", "over", *(field.key for field in PLANNER_FIELDS)})


class PlannerQuery(NamedTuple):
    """A planner's question. `texts`: the given fields of the scenario, by key."""

    texts: Mapping[str, str]
    scenario: Scenario
    strategy: Strategy
    over: CurveAxis


def given_texts(
    pairs: Sequence[tuple[str, str]],
    known: Set[str] = PLANNER_KEYS,
    text_max: int = TEXT_MAX,
) -> dict[str, str]:
    """Return what a query gives, by key, without empty values. Raises ConfigError.

    `known`: keys of the page; `text_max`: characters of a value.
    """
    if len(pairs) > PAIRS_MAX:
        raise ConfigError(f"the address has {len(pairs):,} values; at most {PAIRS_MAX}")
    texts: dict[str, str] = {}
    for key, text in pairs:
        if key in REFUSED_FIELDS and known is PLANNER_KEYS:
            raise ConfigError(f"{key} {REFUSED_FIELDS[key]}")
        if key not in known:
            raise ConfigError(f"{_short(key)!r} is unknown; known are {', '.join(sorted(known))}")
        if len(text) > text_max:
            raise ConfigError(f"{key} has {len(text):,} characters; at most {text_max}")
        if key in texts:
            raise ConfigError(f"{key} is given twice")
        if text.strip():
            texts[key] = text.strip()
    return texts


def parse_query(texts: Mapping[str, str]) -> PlannerQuery:
    """Return the question. Raises ConfigError with the field."""
    fields = {key: text for key, text in texts.items() if key not in ("strategy", "over")}
    strategy: Strategy = _choice("strategy", texts.get("strategy", STRATEGY), STRATEGIES)
    over: CurveAxis = _choice("over", texts.get("over", "gpus"), AXES)
    scenario = scenario_of({"gpus": GPUS, **fields})
    return PlannerQuery(fields, scenario, strategy, over)


def _choice(key: str, text: str, choices: tuple[T, ...]) -> T:
    found = next((choice for choice in choices if choice == text), None)
    if found is None:
        raise ConfigError(f"{key} {text} is unknown; known are {', '.join(map(str, choices))}")
    return found


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}..."
