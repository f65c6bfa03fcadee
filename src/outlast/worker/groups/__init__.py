"""Stable process groups: ours for ever, forwarding to inner groups that come and go.

`registry.Groups` is the one object a process has; `stable.StableGroup` is what torch sees.
"""

from outlast.worker.groups.group_registry import GroupRegistry, register
from outlast.worker.groups.inner_group import is_caused_by_transport, is_transport_error
from outlast.worker.groups.setup_record import SetupRecord
from outlast.worker.groups.stable_group import StableGroup

__all__ = [
    "GroupRegistry",
    "SetupRecord",
    "StableGroup",
    "is_caused_by_transport",
    "is_transport_error",
    "register",
]
