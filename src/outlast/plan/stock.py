"""How many spares cost least, where the failure rate itself is not sure."""

from __future__ import annotations

import msgspec

from outlast.plan.scenario import NEVER_S, Scenario
from outlast.plan.spares import Stocks, cheapest, equally_likely


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """`best`: what costs least on the average over what the rate may be; `known`: what would if the
    rate were known to be its mean. `in_repair`: nodes, on the average, at that rate. `racks`: they
    fail as a whole, too."""

    best: int
    known: int
    in_repair: float
    racks: bool


def stock(scenario: Scenario) -> Held:
    """For a job that waits for a repair where no spare is left; no more than there are nodes. Exact
    at each of the equally likely rates."""
    here, nodes = Stocks(scenario), scenario.nodes
    best = cheapest([Stocks(one) for one in equally_likely(scenario)])
    return Held(
        best=min(best, nodes), known=min(cheapest([here]), nodes), in_repair=here.mean,
        racks=scenario.rack_mtbf_s < NEVER_S,
    )  # fmt: skip
