"""Public harness: what runs are tried with before hardware tries them.

`run_seed(seed)` plays one seeded schedule of failures against the real controller on a virtual
clock and raises SimFailure where a promise is broken; `SimCluster` plays a plan of your own.
`StoreContract` and `CheckContract` test checkpoint stores and node checks of your own; these two
need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outlast.testing.chaos import Plan, Strike, draw
from outlast.testing.cluster import Outcome, SimCluster, run_seed
from outlast.testing.ledger import SimFailure

if TYPE_CHECKING:
    from outlast.testing.checks import CheckContract as CheckContract
    from outlast.testing.stores import StoreContract as StoreContract

_HOMES = {
    "CheckContract": "outlast.testing.checks",
    "StoreContract": "outlast.testing.stores",
}
__all__ = [
    "CheckContract",
    "Outcome",
    "Plan",
    "SimCluster",
    "SimFailure",
    "StoreContract",
    "Strike",
    "draw",
    "run_seed",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outlast.testing' has no attribute {name!r}")
