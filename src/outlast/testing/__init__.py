"""Public harness: what runs are tried with before hardware tries them.

`run_seed(seed)` plays one seeded schedule of failures against the real controller on a virtual
clock and raises SimFailure where a promise is broken; `SimCluster` plays a plan of your own.
"""

from outlast.testing.chaos import Plan, Strike, draw
from outlast.testing.cluster import Outcome, SimCluster, run_seed
from outlast.testing.ledger import SimFailure

__all__ = ["Outcome", "Plan", "SimCluster", "SimFailure", "Strike", "draw", "run_seed"]
