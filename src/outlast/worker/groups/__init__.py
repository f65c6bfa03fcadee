"""Stable process groups: ours for ever, forwarding to inner groups that come and go.

`registry.Groups` is the one object a process has; `stable.StableGroup` is what torch sees.
"""

from outlast.worker.groups.record import Record
from outlast.worker.groups.registry import Groups, register
from outlast.worker.groups.stable import StableGroup
from outlast.worker.groups.trouble import is_caused_by_transport, is_transport_error

__all__ = [
    "Groups", "Record", "StableGroup", "is_caused_by_transport", "is_transport_error", "register",
]  # fmt: skip
