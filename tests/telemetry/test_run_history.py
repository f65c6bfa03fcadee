"""Histories in columns equal the events that were read one by one."""

from __future__ import annotations

import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.telemetry.synthetic_run import SyntheticRun

from outlast.events import AnyEvent, Metrics, PhaseDone, WorkerWarm, encoder
from outlast.telemetry.event_store import DIRECTORY, EventReader, EventWriter, read_events
from outlast.telemetry.history import record_layouts
from outlast.telemetry.history.record_layouts import record_layout
from outlast.telemetry.history.run_history import RunHistory, read_history
from outlast.telemetry.segment_files import SegmentDamage, SegmentWriter

# Widths of MessagePack's integers change at these numbers.
EDGES = st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1])
NAMES = st.sampled_from(["w1-0", "w1-1", "w10-345", "name\0", "\u00e9"])
PHASES = st.builds(
    PhaseDone,
    t_ns=EDGES,
    worker=NAMES,
    seat=EDGES | st.just(-1),
    generation=EDGES,
    n=EDGES,
    step=EDGES,
    kind=st.sampled_from(["step", "eval", "strange"]),
    t_begin_ns=EDGES,
    t_vote_ns=EDGES,
    steps=st.sampled_from([1, 2, 300]),
)
METRICS = st.builds(
    Metrics,
    t_ns=EDGES,
    worker=NAMES,
    seat=EDGES,
    step=EDGES,
    values=st.dictionaries(st.sampled_from(["loss", "lr", "a.loss"]), st.floats(), max_size=3),
)
EVENTS = PHASES | METRICS | st.builds(WorkerWarm, t_ns=EDGES, worker=NAMES)


def listed(history: RunHistory) -> list[bytes]:
    """Return the history as the bytes of its events, without what columns leave out."""
    workers, kinds = history.workers, history.kinds
    rows: list[tuple[int, int, AnyEvent]] = []
    for row in zip(*(column.tolist() for column in history.phases), strict=True):
        t_ns, arrival, begin_ns, n, step, steps, generation, seat, worker, kind = row
        event = PhaseDone(
            t_ns=t_ns,
            worker=workers[worker],
            seat=seat,
            generation=generation,
            n=n,
            step=step,
            kind=kinds[kind],
            t_begin_ns=begin_ns,
            t_vote_ns=0,
            steps=steps,
        )
        rows.append((t_ns, arrival, event))
    for row in zip(*(column.tolist() for column in history.metrics), strict=True):
        t_ns, arrival, seat, step, loss, has_loss = row
        values = {"loss": loss} if has_loss else {}
        rows.append(
            (t_ns, arrival, Metrics(t_ns=t_ns, worker="", seat=seat, step=step, values=values))
        )
    rows += [(*key, event) for key, event in zip(history._keys, history.events, strict=True)]
    rows.sort(key=lambda row: row[:2])
    return [encoder.encode(event) for _, _, event in rows]


def shortened(events: list[AnyEvent]) -> list[bytes]:
    """Return what `listed` returns of a history of these events."""
    found = []
    for event in events:
        short = event
        if isinstance(event, PhaseDone):
            short = msgspec.structs.replace(event, t_vote_ns=0)
        elif isinstance(event, Metrics):
            values = {name: value for name, value in event.values.items() if name == "loss"}
            short = msgspec.structs.replace(event, worker="", values=values)
        found.append(encoder.encode(short))
    return found


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(EVENTS, min_size=1, max_size=6),
    order=st.lists(st.integers(0, 5), min_size=1, max_size=300),
    repeat=st.integers(1, 40),
    more=st.lists(EVENTS, max_size=5),
)
def test_columns_equal_single_events(
    kinds: list[AnyEvent], order: list[int], repeat: int, more: list[AnyEvent]
) -> None:
    """Records of few shapes, each many times, as a long run has them; read in two polls."""
    firsts = [WorkerWarm(t_ns=0, worker=f"first-{index}") for index in range(2)]
    events = [*firsts, *(kinds[index % len(kinds)] for index in order for _ in range(repeat))]
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        writers = [EventWriter(run_dir / DIRECTORY, f"w{index}") for index in range(2)]
        history, reader = RunHistory(), EventReader(run_dir)
        for index, event in enumerate(events):
            writers[index == 1 or index % 7 == 3].emit(event)
        history.read(reader)
        first = EventReader(run_dir)
        known = first.poll()
        for event in more:
            writers[0].emit(event)
        assert history.read(reader) == len(more)
        for writer in writers:
            writer.close()
        known = sorted([*known, *first.poll()], key=lambda event: event.t_ns)
    assert listed(history) == shortened(known)
    assert listed(RunHistory.of([*events, *more])) == shortened(
        sorted([*events, *more], key=lambda event: event.t_ns)
    )


def test_records_of_one_length_have_many_structures(tmp_path: Path) -> None:
    """Kinds of equal length, and numbers whose widths are swapped."""
    step = phase(n=300)
    changes = [{}, {"kind": "eval"}, {"n": 7, "step": 70_000}, {"n": 70_000, "step": 7}]
    events: list[AnyEvent] = [msgspec.structs.replace(step, **each) for each in changes * 60]
    writer = EventWriter(tmp_path / DIRECTORY, "w")
    for event in events:
        writer.emit(event)
    writer.close()
    assert listed(read_history(tmp_path)) == shortened(events)


def test_few_records_of_a_long_run_are_decoded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SyntheticRun(tmp_path, world=2).start().steps(2000).end()
    alone: list[int] = []
    decode = EventReader.decode

    def counted(self: EventReader, *where: object) -> AnyEvent | None:
        alone.append(1)
        return decode(self, *where)  # type: ignore[arg-type]

    monkeypatch.setattr(EventReader, "decode", counted)
    history = read_history(tmp_path)
    assert history.count > 8000 and len(alone) < 200


def test_records_that_the_decoder_refuses_are_damage_in_any_number(tmp_path: Path) -> None:
    """Of equal shape with good ones: a step count of 0, a name that is no UTF-8, a large number."""
    good = encoder.encode(phase(n=300, steps=700))
    zero = good.replace(struct.pack(">H", 700), b"\0\0")
    latin = good.replace(b"w1-0", b"w1-\xff")
    late = encoder.encode(phase(n=300, steps=700, t_ns=2**63))
    far = encoder.encode(phase(n=2**63, steps=700))
    writer = SegmentWriter(tmp_path / DIRECTORY, "w")
    for _ in range(100):
        writer.append_all([good, zero, latin, late, far])
    writer.close()
    damages: list[SegmentDamage] = []
    assert read_history(tmp_path, damages.append).count == 100
    assert len(damages) == 400
    again: list[SegmentDamage] = []
    assert len(read_events(tmp_path, again.append)) == 100 and sorted(again) == sorted(damages)


def phase(*, n: int = 1, steps: int = 1, t_ns: int = 5) -> PhaseDone:
    return PhaseDone(
        t_ns=t_ns,
        worker="w1-0",
        seat=0,
        generation=1,
        n=n,
        step=n,
        kind="step",
        t_begin_ns=1,
        t_vote_ns=2,
        steps=steps,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"seat": -1},
        {"seat": "0"},
        {"worker": ""},
        {"extra": 1},
        {"values": {}},
        {"t_ns": 1.5},
        {"kind": None},
        {"n": [1]},
        {"type": "Other"},
    ],
)
def test_what_has_another_structure_is_decoded_alone(change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(phase())
    assert record_layout(msgspec.msgpack.encode(plain)) is not None
    assert record_layout(msgspec.msgpack.encode({**plain, **change})) is None


def test_a_record_of_any_bytes_has_no_layout_or_its_own() -> None:
    payload = encoder.encode(phase(n=70_000))
    for at in range(len(payload)):
        for byte in (0x00, 0x80, 0xC1, 0xCF, 0xD9, 0xFF):
            changed = payload[:at] + bytes((byte,)) + payload[at + 1 :]
            layout = record_layout(changed)
            assert layout is None or layout.tag in record_layouts.TAGS
    assert all(record_layout(payload[:end]) is None for end in range(len(payload)))
