"""Public test harness: simulated clusters, contracts for checks and stores.

`run_seed(seed)` plays one seeded schedule of failures against the real controller on a virtual
clock, `run_takeover_seed(seed)` one of several hosts whose controllers die, stop or are cut off.
They raise SimFailure when a promise is broken. `SimCluster` plays a plan of your own.
`StoreContract`, `CheckContract` and `TermStoreContract` test your own checkpoint stores, node
checks and stores of terms; they need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outlast.testing.fault_plan import FaultPlan, PlannedFault, draw_plan
from outlast.testing.run_invariants import SimFailure
from outlast.testing.simulated_cluster import (
    SimCluster,
    SimOutcome,
    run_seed,
    run_takeover_seed,
)

if TYPE_CHECKING:
    from outlast.testing.extension_contracts import CheckContract as CheckContract
    from outlast.testing.extension_contracts import StoreContract as StoreContract
    from outlast.testing.term_store_contract import TermStoreContract as TermStoreContract

_CONTRACTS = {
    "CheckContract": "extension_contracts",
    "StoreContract": "extension_contracts",
    "TermStoreContract": "term_store_contract",
}
__all__ = [
    "CheckContract",
    "FaultPlan",
    "PlannedFault",
    "SimCluster",
    "SimFailure",
    "SimOutcome",
    "StoreContract",
    "TermStoreContract",
    "draw_plan",
    "run_seed",
    "run_takeover_seed",
]


def __getattr__(name: str) -> Any:
    if name in _CONTRACTS:
        return getattr(import_module(f"outlast.testing.{_CONTRACTS[name]}"), name)
    raise AttributeError(f"module 'outlast.testing' has no attribute {name!r}")
