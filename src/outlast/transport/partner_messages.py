"""Messages about the own state of ranks that their partners on other hosts hold."""

from __future__ import annotations

from outlast.transport.message_base import Body


class PartnerSlotsRequest(Body, frozen=True, tag="PartnerAsk"):
    """Request to an agent for the slots of lost ranks before phase n+1 that its workers hold, from
    generation `since` on."""

    seats: tuple[int, ...]
    n: int
    since: int


class PartnerSlots(Body, frozen=True, tag="PartnerIs"):
    """Answer to PartnerAsk: seat -> "kind:n" -> generation in which it was received, and slot."""

    n: int
    since: int
    slots: dict[int, dict[str, tuple[int, bytes]]]
