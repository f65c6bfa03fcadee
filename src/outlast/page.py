"""The page: memory that a worker shares with its agent and that outlives the worker.

It holds the heartbeat (what the main thread does, overwritten in place, no system call) and a
ring of slots (the rank-specific state before and after a phase, invariant (d) of the protocol).
A worker killed in the middle of a write leaves the older slots whole: a slot counts only when its
digest is right. The memory is a memfd, reserved at creation: it has no name that could be left
behind, and a lack of memory is an error at start and not a SIGBUS in step 9000.

Heartbeat layout (little endian): `<qqqqqqd`: n, step, state, collectives, t_ns, t_state_ns, loss.
Slot layout: `<qqQQ`: kind, n, length, xxh3_64(kind|n|payload), then the payload.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Literal, NamedTuple, get_args

import xxhash

from outlast.errors import ConfigError, ProtectError

_BEAT = struct.Struct("<qqqqqqd")
_SLOT = struct.Struct("<qqQQ")
_BEAT_BYTES = 4096
SLOTS = 6  # before(n), after(n+1), result(n+1), before(n+1), after(n+2), and one being written
SLOT_BYTES = 16 << 20
_RESERVED_BYTES = 256 << 10

State = Literal[
    "starting",  # before init()
    "waiting",  # a spare in init(), without a seat
    "setup",  # between init() and the first phase
    "idle",  # between phases: the script's own code
    "running",  # inside an attempt
    "voting",  # voted yes, waiting for the answer
    "applying",  # the vote is won, the phase is being completed
    "healing",  # waiting for a decision, connecting, moving state
    "dry",  # a rehearsal or a dry step
    "checkpoint",  # writing a checkpoint
    "finished",  # the script has ended
]
STATES: tuple[State, ...] = get_args(State)
Kind = Literal["before", "after", "result"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Beat(NamedTuple):
    """One reading of the heartbeat. Times are CLOCK_MONOTONIC nanoseconds of the host."""

    n: int
    step: int
    state: State
    collectives: int
    t_ns: int
    t_state_ns: int
    loss: float


class Page:
    """One worker's page. Writers: the worker's main thread only. Readers: anybody with the fd."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.slot_bytes = (os.fstat(fd).st_size - _BEAT_BYTES) // SLOTS - _SLOT.size
        self._map = mmap.mmap(fd, 0)
        self._next = 0

    @classmethod
    def create(cls, slot_bytes: int = SLOT_BYTES) -> Page:
        """A fresh page in anonymous memory. Raises ConfigError where the memory is not there."""
        fd = os.memfd_create("outlast-page", os.MFD_CLOEXEC)
        size = _BEAT_BYTES + SLOTS * (slot_bytes + _SLOT.size)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, _BEAT_BYTES)
            for index in range(SLOTS):
                start = _BEAT_BYTES + index * (slot_bytes + _SLOT.size)
                os.posix_fallocate(fd, start, min(_RESERVED_BYTES, slot_bytes))
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"no shared memory for a worker's page ({size} bytes): {error.strerror};"
                " nothing was started; free memory or raise the container's limit"
            ) from error
        return cls(fd)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)

    def beat(
        self,
        n: int,
        step: int,
        state: State,
        collectives: int,
        t_ns: int,
        t_state_ns: int,
        loss: float,
    ) -> None:
        _BEAT.pack_into(
            self._map, 0, n, step, STATES.index(state), collectives, t_ns, t_state_ns, loss
        )

    def read(self) -> Beat:
        n, step, state, collectives, t_ns, t_state_ns, loss = _BEAT.unpack_from(self._map, 0)
        return Beat(n, step, STATES[state], collectives, t_ns, t_state_ns, loss)

    def put(self, kind: Kind, n: int, payload: bytes) -> None:
        """Write a slot over the oldest one. Raises ProtectError above the slot's size."""
        if len(payload) > self.slot_bytes:
            raise ProtectError(
                f"this rank's own state (random generators, data position, small protected objects)"
                f" takes {len(payload)} bytes, above the slot of {self.slot_bytes}; protect large"
                " tensors inside a module or wrap the object in outlast.Replicated"
            )
        at = _BEAT_BYTES + self._next * (self.slot_bytes + _SLOT.size)
        _SLOT.pack_into(self._map, at, 0, 0, 0, 0)
        body = at + _SLOT.size
        self._map[body : body + len(payload)] = payload
        code = KINDS.index(kind)
        _SLOT.pack_into(self._map, at, code, n, len(payload), _digest(code, n, payload))
        self._next = (self._next + 1) % SLOTS

    def slots(self) -> dict[str, bytes]:
        """Every whole slot, keyed "kind:n"."""
        found: dict[str, bytes] = {}
        for index in range(SLOTS):
            at = _BEAT_BYTES + index * (self.slot_bytes + _SLOT.size)
            code, n, length, digest = _SLOT.unpack_from(self._map, at)
            if not (0 <= code < len(KINDS) and 0 < length <= self.slot_bytes):
                continue
            body = at + _SLOT.size
            payload = bytes(self._map[body : body + length])
            if _digest(code, n, payload) == digest:
                found[f"{KINDS[code]}:{n}"] = payload
        return found


def _digest(code: int, n: int, payload: bytes) -> int:
    head = struct.pack("<qq", code, n)
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh32_intdigest(head))
