"""Results of the set-up collectives of generation 1, kept for joiners.

Entries by group (its number in order of creation, which replicas have in common) and position:
the op, its output shapes, and the bytes of small integer results. A
joiner runs the same script, so the same position has the same op. At the first mismatch, replay
ends for that group and dry answers are used.

`CollectiveRules` decides when a script may call collectives after its set-up: inside a phase, and
not after its vote.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from outlast.errors import CorruptionError, PhaseError

RESULT_BYTES_MAX = 64 << 10
TOTAL_BYTES_MAX = 8 << 20
ENTRIES_MAX = 200_000  # of all groups; later collectives get dry answers
_KEPT = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.uint16, torch.uint32, torch.uint64}
)


class SetupEntry(msgspec.Struct, array_like=True):
    """One collective: `shape` lists every written tensor as "dtype[size,size]"."""

    op: str
    shape: tuple[str, ...]
    value: bytes | None = None


class SetupRecord:
    """Record of set-up results: records while `recording`, replays after `decode`. Thread-safe."""

    def __init__(self) -> None:
        self.recording = True
        self._lock = threading.Lock()
        self._groups: dict[int, list[SetupEntry]] = {}
        self._kept_bytes = 0
        self._entries = 0
        self._position: dict[int, int] = {}
        self._ended: set[int] = set()

    def stop(self) -> None:
        """Stop recording at the end of set-up."""
        self.recording = False

    def encode(self) -> bytes:
        """Return the record as bytes."""
        with self._lock:
            return msgspec.msgpack.encode(self._groups)

    @classmethod
    def decode(cls, data: bytes) -> SetupRecord:
        """Return a record to replay. Raises CorruptionError if `data` cannot be decoded."""
        record = cls()
        record.recording = False
        if data:
            try:
                record._groups = msgspec.msgpack.decode(data, type=dict[int, list[SetupEntry]])
            except msgspec.DecodeError as error:
                raise CorruptionError(
                    f"the record of set-up results ({len(data)} bytes) cannot be read: {error};"
                    " this joiner cannot take its seat; the controller starts another"
                ) from error
        return record

    def note(self, group: int, op: str, tensors: Sequence[torch.Tensor]) -> SetupEntry | None:
        """Record the start of `op`; `capture` adds its result. None if the record is full."""
        entry = SetupEntry(op, _shape(tensors))
        with self._lock:
            if self._entries >= ENTRIES_MAX:
                return None
            self._entries += 1
            self._groups.setdefault(group, []).append(entry)
        return entry

    def capture(self, entry: SetupEntry, tensors: Sequence[torch.Tensor]) -> None:
        """Store the result of a completed op if it is small and has an integer dtype."""
        if not tensors or any(tensor.dtype not in _KEPT for tensor in tensors):
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        with self._lock:
            if entry.value is not None or size > RESULT_BYTES_MAX:
                return
            if self._kept_bytes + size > TOTAL_BYTES_MAX:
                return
            self._kept_bytes += size
        entry.value = b"".join(_bytes(tensor) for tensor in tensors)

    def replay(self, group: int, op: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Replay the result of the next collective of `group` from generation 1. Return False if
        none is recorded (the dry answer is then used)."""
        with self._lock:
            entries = self._groups.get(group)
            if self.recording or entries is None or group in self._ended:
                return False
            position = self._position.get(group, 0)
            if position >= len(entries):
                return False
            entry = entries[position]
            self._position[group] = position + 1
            if entry.op != op or entry.shape != _shape(tensors):
                self._ended.add(group)
                return False
        if entry.value is None:
            return False
        _restore(entry.value, tensors)
        return True


def _shape(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
    return tuple(f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for t in tensors)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _restore(value: bytes, tensors: Sequence[torch.Tensor]) -> None:
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            end = start + tensor.numel() * tensor.element_size()
            if end > start:
                flat = torch.frombuffer(bytearray(value[start:end]), dtype=tensor.dtype)
                tensor.copy_(flat.view(tensor.shape))
            start = end


class CollectiveRules:
    """Rules of the current phase, checked before every collective."""

    def __init__(self) -> None:
        self.started = False
        self._pid = os.getpid()
        self._inside = False
        self._sealed = False

    def start(self) -> bool:
        """Restrict collectives to phases from now on; return whether they were not before."""
        was_started, self.started = self.started, True
        return not was_started

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Allow collectives until the phase's vote."""
        if self._inside:
            raise PhaseError("a phase was begun inside a phase; session.run does not nest")
        self._inside, self._sealed = True, False
        try:
            yield
        finally:
            self._inside = self._sealed = False

    def seal(self) -> None:
        """Refuse further collectives of this phase."""
        self._sealed = self._inside

    def check(self, op: str) -> None:
        """Check that `op` is allowed here. Raises PhaseError."""
        if os.getpid() != self._pid:
            raise PhaseError(
                f"{op} in a process that the script has forked: the connections are its parent's,"
                " and nothing was sent; communicate in the script's own process"
            )
        if self._sealed:
            raise PhaseError(
                f"{op} after the vote of this phase (after optimizer.step): a rank that is lost now"
                " would leave the others waiting in it; move it before the step or into the next"
                " session.run. Where two optimizers step in turn, with a backward between them (a"
                " GAN), each is a phase: session.run(train_discriminator, batch), then"
                " session.run(train_generator, batch), or both are one, by"
                " session.run_with_undo(train_step, batch), which copies the state first"
            )
        if self.started and not self._inside:
            raise PhaseError(
                f"{op} outside a phase: only what runs inside session.run can be redone when a"
                " worker is lost; call it through session.run(...)"
            )
