"""Check of a run's history: what workers have committed, against the decisions of the journal.

A run is linearizable if one sequence of phases explains what all of its processes have seen. The
journal is that sequence: generation g stands before phase n+1, so that phases are committed in g up
to the place of the next decision. Only a decision `start` goes back further, and all ranks with it.
Times of two hosts are not compared: each worker's own order, generations and phases are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from outlast.controller.inputs import AnyEntry, DecisionMade, Opened
from outlast.controller.lifecycle.journal_segments import join_segments
from outlast.events import PhaseDone
from outlast.telemetry.event_store import read_events
from outlast.telemetry.segment_files import read_records

_decoder: msgspec.msgpack.Decoder[AnyEntry] = msgspec.msgpack.Decoder(AnyEntry)
_TERM = "term"


class CommittedPhase(NamedTuple):
    """One phase that a worker has completed. `content`: equal on all ranks and when redone."""

    worker: str
    seat: int
    generation: int  # the newest that was open for it
    n: int
    content: tuple[object, ...]


class GenerationSpan(NamedTuple):
    """A decision of the journal: its generation stands before phase n+1, until `end`."""

    decision: DecisionMade
    opened: bool
    end: int  # the place of the next decision; -1: there is none
    end_verdict: str
    takes_back: bool  # the next decision may take one phase back


def check_run(run_dir: Path) -> list[str]:
    """Return what contradicts the journal of a run directory; [] where nothing does."""
    segments: dict[int, list[AnyEntry]] = {}
    damage: list[str] = []
    for record in read_records(run_dir / "journal", lambda one: damage.append(str(one))):
        term = int(record.writer[len(_TERM) :]) if record.writer.startswith(_TERM) else 0
        segments.setdefault(term, []).append(_decoder.decode(record.payload))
    done = [event for event in read_events(run_dir) if isinstance(event, PhaseDone)]
    phases = [
        CommittedPhase(each.worker, each.seat, each.generation, each.n, (each.step, each.kind))
        for each in done
    ]
    return check_history(segments, phases)


def check_history(
    segments: Mapping[int, Sequence[AnyEntry]], phases: Iterable[CommittedPhase]
) -> list[str]:
    """Return what contradicts the decisions, as sentences. `phases`: in each worker's order."""
    spans, problems = _spans(join_segments(segments))
    by_generation: dict[int, list[CommittedPhase]] = {}
    occupants: dict[tuple[int, int], str] = {}
    newest: dict[str, CommittedPhase] = {}
    for phase in phases:
        by_generation.setdefault(phase.generation, []).append(phase)
        owner = occupants.setdefault((phase.generation, phase.seat), phase.worker)
        if owner != phase.worker:
            problems.append(f"{owner} and {_text(phase)}: two workers of one rank")
        before = newest.get(phase.worker)
        if before is not None and before.generation > phase.generation:
            problems.append(f"{_text(phase)} after one in generation {before.generation}")
        newest[phase.worker] = phase
    contents: dict[int, tuple[object, ...]] = {}
    for generation, committed in sorted(by_generation.items()):
        span = spans.get(generation)
        if span is None:
            problems.append(f"{_text(committed[0])}, which no decision that counts has begun")
            continue
        for first in _starts(spans, generation):
            contents = {n: known for n, known in contents.items() if n <= first}
        problems += _check_span(span, committed, contents)
    return problems


def _spans(journal: Sequence[AnyEntry]) -> tuple[dict[int, GenerationSpan], list[str]]:
    """Return the decisions by generation, and what contradicts itself among them."""
    decisions = [entry for entry in journal if isinstance(entry, DecisionMade)]
    opened = {entry.generation: entry for entry in journal if isinstance(entry, Opened)}
    places = {each.generation: each.n for each in decisions}
    problems = [
        f"generation {entry.generation} opened before phase {entry.n + 1}"
        for entry in opened.values()
        if places.get(entry.generation) != entry.n
    ]
    spans: dict[int, GenerationSpan] = {}
    for index, each in enumerate(decisions):
        later = decisions[index + 1] if index + 1 < len(decisions) else None
        if later is not None and later.generation <= each.generation:
            problems.append(f"generation {later.generation} was decided after {each.generation}")
        if later is not None and later.verdict != "start" and later.n < each.n:
            back = later.copy is not None and later.n == each.n - 1
            if not back:
                problems.append(f"phase {later.n} was decided after phase {each.n}")
        spans[each.generation] = GenerationSpan(
            each,
            each.generation in opened,
            later.n if later is not None else -1,
            later.verdict if later is not None else "",
            later is not None and later.copy is not None,
        )
    return spans, problems


def _starts(spans: Mapping[int, GenerationSpan], generation: int) -> list[int]:
    """Return the place to which a generation goes back, as a list of one; [] if it does not."""
    decision = spans[generation].decision
    return [decision.n] if decision.verdict == "start" or decision.copy is not None else []


def _check_span(
    span: GenerationSpan,
    committed: Sequence[CommittedPhase],
    contents: dict[int, tuple[object, ...]],
) -> list[str]:
    """Compare the phases of one generation with its place and the next decision's."""
    problems: list[str] = []
    ranks: dict[int, set[int]] = {}
    world = len(span.decision.seats) - len(span.decision.absent)
    for phase in committed:
        ranks.setdefault(phase.n, set()).add(phase.seat)
        known = contents.setdefault(phase.n, phase.content)
        if known != phase.content:
            problems.append(f"{_text(phase)} as {phase.content}, another rank as {known}")
        if not span.opened and phase.n > span.decision.n:
            problems.append(f"{_text(phase)}, which was not open")
        if phase.n < span.decision.n:
            problems.append(f"{_text(phase)}, which stands before {span.decision.n + 1}")
    if span.end < 0 or span.end_verdict == "start":
        return problems
    # A lost rank alone may have completed one phase more than the survivors, who go back by one.
    farthest = span.end + 1 + span.takes_back
    for n, seats in sorted(ranks.items()):
        if n > farthest:
            problems.append(
                f"phase {n} was committed in generation {span.decision.generation},"
                f" and {span.end} was decided next"
            )
        if n > span.end and len(seats) == world and not span.takes_back:
            problems.append(f"all ranks committed phase {n}, and {span.end} was decided next")
    return problems


def _text(phase: CommittedPhase) -> str:
    return (
        f"{phase.worker} at rank {phase.seat} committed phase {phase.n}"
        f" in generation {phase.generation}"
    )
