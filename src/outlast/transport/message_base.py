"""Base of the messages between workers, agents and the controller."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True, gc=False):
    """Base class of all message bodies. They have no cycles: the collector passes over them."""
