"""What node checks had said when something broke."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from outlast.events import AnyEvent, Warned
from outlast.observe.incidents import Incident
from outlast.observe.words import duration, warning

BEFORE_S = 600.0
LINES_MAX = 5


def before(one: Incident, events: Sequence[AnyEvent]) -> list[Warned]:
    """Warnings of the minutes before an incident on its worker's host, and those that were said
    earlier and not over; of all hosts, where nobody knows which it was."""
    open_ones: dict[tuple[str, ...], Warned] = {}
    recent: list[Warned] = []
    for event in events:
        if event.t_ns > one.t_ns:
            break
        if not isinstance(event, Warned) or one.cause.host not in ("", event.host):
            continue
        key = (event.host, event.check, event.symptom, event.code, event.device)
        if event.severity == "healthy":
            open_ones.pop(key, None)
            recent.append(event)
        else:
            open_ones[key] = event
    since_ns = one.t_ns - int(BEFORE_S * 1e9)
    over = [event for event in recent if event.t_ns >= since_ns]
    return sorted([*open_ones.values(), *over], key=lambda event: event.t_ns)


def lines(found: Iterable[Incident], events: Sequence[AnyEvent]) -> Iterator[str]:
    """`incident 1: 3 min 04 s before: now: gpu: XID 79 on GPU 2 (node-7): fell off the bus`."""
    for one in found:
        told = before(one, events)
        for event in told[-LINES_MAX:]:
            ago = duration((one.t_ns - event.t_ns) / 1e9)
            yield f"incident {one.number}: {ago} before: {warning(event)}"
