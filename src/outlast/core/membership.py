"""Generations: who sits in which seat, when a generation closes, and what then is decided.

`handle(state, event) -> (state, actions)` is the whole controller; `launch/controller.py` feeds it
real frames, `outlast.testing` millions of simulated ones. The invariants (a) to (g) are in
docs/protocol.md.
"""

from __future__ import annotations

import msgspec

from outlast import events, wire


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The controller starts. `journal`: what earlier terms of this job wrote, oldest first."""

    t_ns: int
    run: str
    term: int
    journal: tuple[JournalEntry, ...] = ()
    checkpoint: wire.Checkpointed | None = None  # the newest complete one, if any


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A frame arrived: authenticated, of this run; term, incarnation and order are checked here."""

    t_ns: int
    envelope: wire.Envelope


class AgentGone(msgspec.Struct, frozen=True, kw_only=True):
    """The connection to an agent broke. Its workers count as lost only when its lease is out."""

    t_ns: int
    agent: str
    incarnation: int


class StopAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A person or the scheduler asks the run to end, resumable."""

    t_ns: int
    reason: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a Wake asked for has come (or later)."""

    t_ns: int


Input = Begin | Received | AgentGone | StopAsked | Tick


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """A frame to an agent; with `worker`, to be passed on to that worker."""

    agent: str
    worker: str
    body: wire.AnyBody


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Make `entry` durable before any later action of this list is carried out."""

    entry: JournalEntry


class Emit(msgspec.Struct, frozen=True, kw_only=True):
    event: events.AnyEvent


class Wake(msgspec.Struct, frozen=True, kw_only=True):
    """Send a Tick at `t_ns` (replaces the earlier Wake)."""

    t_ns: int


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over. `outcome`: done | user_error | gave_up | interrupted."""

    outcome: str
    exit_code: int
    cause: events.Fault | None = None


Action = Send | Journal | Emit | Wake | End


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of what a later term must know."""


class DecisionMade(JournalEntry, frozen=True):
    generation: int
    n: int
    step: int
    verdict: str
    seats: tuple[str, ...]
    slots: dict[int, dict[str, bytes]] = {}  # seat -> what its lost worker left


class Opened(JournalEntry, frozen=True):
    generation: int
    n: int


class SharedKept(JournalEntry, frozen=True):
    name: str
    value: bytes
