"""Stable process groups: they outlive generations, and forward to the inner groups of each one.

A process has one `GroupRegistry`; torch gets its `StableGroup`s.

States of `GroupRegistry`:

| state      | meaning                                  | entered by            | next            |
|------------|------------------------------------------|-----------------------|-----------------|
| waiting    | no generation yet                        | construction          | dry, connecting |
| dry        | groups answer by themselves              | `take_seat(dry=True)` | connecting      |
| connecting | groups of a generation are being built   | `connect`             | live, closed    |
| live       | collectives run                          | the end of `connect`  | closed          |
| closed     | the generation is over                   | `sever`, `failed`     | connecting      |

Order of locks: `GroupRegistry._lock`, then the mailbox's, `PendingWorks`' or `SetupRecord`'s.
Callbacks (the mailbox's, `on_trouble`, `on_collective`) run without any of them.
"""

from outlast.worker.groups.backend_registration import register
from outlast.worker.groups.group_proof import prove_groups, warn_if_untried
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.inner_group import (
    fault_kind,
    is_caused_by_transport,
    is_transport_error,
)
from outlast.worker.groups.setup_record import SetupRecord
from outlast.worker.groups.stable_group import StableGroup

__all__ = [
    "GroupRegistry",
    "SetupRecord",
    "StableGroup",
    "fault_kind",
    "is_caused_by_transport",
    "is_transport_error",
    "prove_groups",
    "register",
    "warn_if_untried",
]
