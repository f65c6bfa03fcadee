"""Public test harness: simulated clusters, contracts for checks and stores.

`run_seed(seed)` plays one seeded schedule of failures against the real controller on a virtual
clock and raises SimFailure where a promise is broken; `SimCluster` plays a plan of your own.
"""

from outlast.testing.fault_plan import FaultPlan, PlannedFault, draw_plan
from outlast.testing.run_invariants import SimFailure
from outlast.testing.simulated_cluster import SimCluster, SimOutcome, run_seed

__all__ = [
    "FaultPlan",
    "PlannedFault",
    "SimCluster",
    "SimFailure",
    "SimOutcome",
    "draw_plan",
    "run_seed",
]
