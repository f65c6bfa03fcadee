"""Worker page: memory that a worker shares with its agent and that outlives the worker.

It holds the heartbeat of the main thread, overwritten in place without a system call, and slots.
Slots hold rank-specific state around a phase (invariant (d) of the protocol). A slot is valid
only if its digest matches, so a worker killed during a write leaves the older slots intact. The
memory is a memfd: it has no name to clean up. The first 256 KiB of each slot are reserved at
creation, so that missing memory is an error at start; a larger state allocates more when it is
first written.

All numbers are little endian.

| at, in bytes                | layout    | content                                                |
|-----------------------------|-----------|--------------------------------------------------------|
| 0                           | `qqqqqqdq`| heartbeat: n, step, state, collectives, t_ns,          |
|                             |           | t_state_ns, loss, key of the newest phase              |
| 64                          | `qqqq`    | pulse: t_ns of its write, t_ns of the heartbeat that it|
|                             |           | read, 1 if the main thread waited for other ranks,     |
|                             |           | t_ns of the end of the last such wait                  |
| 96                          | `q`       | end of the host's lease, CLOCK_BOOTTIME ns; 0: none    |
| 104                         | `qq`      | pid of the process that called `init()`; 1 if another  |
|                             |           | process of the script was refused                      |
| 128 + 24 i, i < `KEYS`      | `qqq`     | pace of a kind of phase: key, completed, slowest_ns    |
| 1664                        | `q`       | number of records of own time that were written        |
| 1672 + 48 (i % `OWN_TIMES`) | `qqqqqq`  | the i-th record: generation, step, and sums since the  |
|                             |           | process began: steps, step_us, own_us, before_us       |
| 4096 + i (40 + slot bytes), | `qqQQQ`   | slot: kind, n, count, length,                          |
| i < `SLOTS`                 |           | xxh3_64(kind, n, count, payload), then the payload     |

`count` increases with every write: of two slots with one key, the higher count is newer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec
import xxhash

from outlast.errors import ConfigError, ProtectError

_BEAT = struct.Struct("<qqqqqqdq")
_PULSE = struct.Struct("<qqqq")
_PULSE_AT = 64
_LEASE = struct.Struct("<q")
_LEASE_AT = 96
_OWNER = struct.Struct("<q")
_OWNER_AT = 104
_REFUSAL_AT = 112
_PACE = struct.Struct("<qqq")
_PACES_AT = 128
KEYS = 64  # a run has a handful: its step, evaluations, and internal phases
_OWN_COUNT_AT = 1664
_OWN_COUNT = struct.Struct("<q")
_OWN = struct.Struct("<qqqqqq")
_OWN_AT = 1672
OWN_TIMES = 48  # of more than a period of renewals
_SLOT = struct.Struct("<qqQQQ")
_BEAT_BYTES = 4096
# before(n), after(n+1), result(n+1), before(n+1), after(n+2), result(n+2), and one being written
SLOTS = 7
SLOT_BYTES = 16 << 20
_RESERVED_BYTES = 256 << 10
_NAME = "outlast-page"

State = Literal[
    "starting",  # before init()
    "waiting",  # a spare in init(), without a seat
    "setup",  # between init() and the first phase
    "idle",  # between phases: the script's own code
    "running",  # inside an attempt
    "sharing",  # exchanges its own state with partners on other hosts, before its vote
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
    """Heartbeat of a worker. Times are CLOCK_MONOTONIC nanoseconds of the host."""

    n: int
    step: int
    state: State
    collectives: int
    t_ns: int
    t_state_ns: int
    loss: float
    key: int = 0  # key of the current or last phase


class Pulse(NamedTuple):
    """Report of the pulse thread on a worker's main thread."""

    t_ns: int  # time of the report; 0: none
    beat_ns: int  # `t_ns` of the heartbeat that it refers to
    is_waiting: bool  # the main thread waited for other ranks
    released_ns: int  # end of the last observed wait


class PhasePace(NamedTuple):
    """Duration statistics of one kind of phase in one process."""

    phases: int  # completed
    slowest_ns: int  # decaying maximum; 0: not measured


class OwnTimeRecord(NamedTuple):
    """Sums over the measured steps of a process, at the commit of `step` (sentinels/own_time)."""

    generation: int = 0
    step: int = 0
    steps: int = 0  # that were measured
    step_us: int = 0  # their length
    own_us: int = 0  # of that, not waiting for other ranks
    before_us: int = 0  # of that, before the phase: the script's own code, loading data


class Page:
    """One worker's page. Writers: the worker's main thread, the pulse thread for the pulse, and the
    agent for the lease. Readers: any process with the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.end = os.fstat(fd).st_size  # behind it lies the memory of partners
        self.slot_bytes = (self.end - _BEAT_BYTES) // SLOTS - _SLOT.size
        self._map = mmap.mmap(fd, 0)
        found = map(self._slot, range(SLOTS))
        self._slots = [slot[:3] if slot else None for slot in found]  # count, kind, n
        self._count = max((slots[0] for slots in self._slots if slots), default=0)

    @classmethod
    def create(cls, slot_bytes: int = SLOT_BYTES) -> Page:
        """Return a new page in anonymous memory; raises ConfigError if memory is insufficient."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
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
        """Unmap the page."""
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
        key: int = 0,
    ) -> None:
        """Write the heartbeat: position, state and times."""
        _BEAT.pack_into(
            self._map, 0, n, step, STATES.index(state), collectives, t_ns, t_state_ns, loss, key
        )

    def read(self) -> Beat:
        """Return the newest heartbeat."""
        n, step, state, *numbers = _BEAT.unpack_from(self._map, 0)
        return Beat(n, step, STATES[state], *numbers)

    def put_pulse(self, pulse: Pulse) -> None:
        """Write whether the main thread, unchanged since `beat_ns`, waits for other ranks."""
        _PULSE.pack_into(self._map, _PULSE_AT, *pulse)

    def pulse(self) -> Pulse:
        """Return the newest report of the pulse thread."""
        t_ns, beat_ns, is_waiting, released_ns = _PULSE.unpack_from(self._map, _PULSE_AT)
        return Pulse(t_ns, beat_ns, bool(is_waiting), released_ns)

    def put_lease(self, end_ns: int) -> None:
        """Write the time at which others may have this rank, of CLOCK_BOOTTIME."""
        _LEASE.pack_into(self._map, _LEASE_AT, end_ns)

    def has_lease(self) -> bool:
        """Return whether the host's lease has not ended, or has no end."""
        (end_ns,) = _LEASE.unpack_from(self._map, _LEASE_AT)
        return not end_ns or time.clock_gettime_ns(time.CLOCK_BOOTTIME) < end_ns

    def claim(self, pid: int) -> int:
        """Note the process that becomes the worker, unless there is one; return its pid."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            (owner,) = _OWNER.unpack_from(self._map, _OWNER_AT)
            if not owner:
                _OWNER.pack_into(self._map, _OWNER_AT, pid)
            return owner or pid
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def put_refusal(self) -> None:
        """Note that a process which the script has started was refused."""
        _OWNER.pack_into(self._map, _REFUSAL_AT, 1)

    def has_refusal(self) -> bool:
        """Return whether a process that the script has started was refused."""
        return _OWNER.unpack_from(self._map, _REFUSAL_AT) != (0,)

    def put_pace(self, index: int, key: int, pace: PhasePace) -> None:
        """Write the pace of the `index`-th kind of phase (below KEYS)."""
        _PACE.pack_into(self._map, _PACES_AT + index * _PACE.size, key, *pace)

    def paces(self) -> dict[int, PhasePace]:
        """Return the pace of each kind of phase that this process has completed, by key."""
        found: dict[int, PhasePace] = {}
        for index in range(KEYS):
            key, *pace = _PACE.unpack_from(self._map, _PACES_AT + index * _PACE.size)
            if not key:
                break
            found[key] = PhasePace(*pace)
        return found

    def put_own_time(self, record: OwnTimeRecord) -> None:
        """Write a record in place of the oldest one."""
        (count,) = _OWN_COUNT.unpack_from(self._map, _OWN_COUNT_AT)
        _OWN.pack_into(self._map, _OWN_AT + count % OWN_TIMES * _OWN.size, *record)
        _OWN_COUNT.pack_into(self._map, _OWN_COUNT_AT, count + 1)

    def own_times(self, since: int) -> tuple[int, list[OwnTimeRecord]]:
        """Return how many records were written, and those behind the first `since` that are still
        here."""
        (count,) = _OWN_COUNT.unpack_from(self._map, _OWN_COUNT_AT)
        places = range(max(since, count - OWN_TIMES + 1, 0), count)  # the oldest may be in change
        found = (_OWN.unpack_from(self._map, _OWN_AT + i % OWN_TIMES * _OWN.size) for i in places)
        return count, [OwnTimeRecord(*each) for each in found]

    def put(self, kind: Kind, n: int, payload: bytes) -> None:
        """Write a slot to the entry chosen by `_least_needed`; raises ProtectError above its
        size."""
        if len(payload) > self.slot_bytes:
            raise ProtectError(
                f"this rank's own state (random generators, data position, small protected objects)"
                f" takes {len(payload)} bytes, above the slot of {self.slot_bytes}; protect large"
                " tensors inside a module or wrap the object in outlast.Replicated"
            )
        code = KINDS.index(kind)
        index = self._least_needed()
        at = _BEAT_BYTES + index * (self.slot_bytes + _SLOT.size)
        _SLOT.pack_into(self._map, at, 0, 0, 0, 0, 0)
        body = at + _SLOT.size
        self._map[body : body + len(payload)] = payload
        self._count += 1
        digest = _digest(code, n, self._count, payload)
        _SLOT.pack_into(self._map, at, code, n, self._count, len(payload), digest)
        self._slots[index] = (self._count, code, n)

    def drop(self, kind: Kind, n: int) -> None:
        """Erase every copy of a slot whose phase was undone."""
        code = KINDS.index(kind)
        for index, slots in enumerate(self._slots):
            if slots is not None and slots[1:] == (code, n):
                at = _BEAT_BYTES + index * (self.slot_bytes + _SLOT.size)
                _SLOT.pack_into(self._map, at, 0, 0, 0, 0, 0)
                self._slots[index] = None

    def _least_needed(self) -> int:
        """Return the index to overwrite: an empty slot, else the oldest slot with a newer copy,
        else the oldest slot."""
        if None in self._slots:
            return self._slots.index(None)
        copies = sorted(copy for copy in self._slots if copy)
        newest = {copy[1:]: copy for copy in copies}
        older = (copy for copy in copies if newest[copy[1:]] is not copy)
        return self._slots.index(next(older, copies[0]))

    def slots(self) -> dict[str, bytes]:
        """Return the newest valid copy of every slot by "kind:n"."""
        found = sorted(filter(None, map(self._slot, range(SLOTS))))
        return {f"{KINDS[code]}:{n}": payload for _, code, n, payload in found}

    def _slot(self, index: int) -> tuple[int, int, int, bytes] | None:
        """Return count, kind, n and payload; None if the slot is not valid."""
        at = _BEAT_BYTES + index * (self.slot_bytes + _SLOT.size)
        code, n, count, length, digest = _SLOT.unpack_from(self._map, at)
        if not (0 <= code < len(KINDS) and 0 < length <= self.slot_bytes):
            return None
        body = at + _SLOT.size
        payload = bytes(self._map[body : body + length])
        return (count, code, n, payload) if _digest(code, n, count, payload) == digest else None


def is_page(fd: int) -> bool:
    """Return whether a descriptor, perhaps one of another file by now, is that of a page."""
    try:
        return _NAME in Path(f"/proc/self/fd/{fd}").readlink().name  # memfd:NAME (deleted)
    except OSError:
        return False


def _digest(code: int, n: int, count: int, payload: bytes) -> int:
    head = struct.pack("<qqQ", code, n, count)
    return xxhash.xxh3_64_intdigest(payload, seed=xxhash.xxh32_intdigest(head))


WARM_PHASES = 2  # slower than later phases: kernels, allocators, compilers
_FADES = 16  # the maximum decays by 1/16 with each faster phase
_KEY_BITS = 63

UNSEEN = PhasePace(0, 0)


def phase_key(name: str) -> int:
    """Return the key, never 0, of phases with this name."""
    return (xxhash.xxh3_64_intdigest(name.encode()) & ((1 << _KEY_BITS) - 1)) or 1


def updated_pace(pace: PhasePace, took_ns: int) -> PhasePace:
    """Return the pace after another phase that took `took_ns`."""
    if pace.phases < WARM_PHASES:
        return PhasePace(pace.phases + 1, 0)
    return PhasePace(pace.phases + 1, max(took_ns, pace.slowest_ns - pace.slowest_ns // _FADES, 1))


# A recovering rank waits for others; the controller has its own deadlines for it.
VOTE: tuple[State, ...] = ("sharing", "voting")  # behind all of an attempt's own work
_NEVER = ("waiting", "finished", "healing")


class WorkerObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of a worker: its page, and its state letter in /proc (R S D T t Z)."""

    worker: str
    seat: int  # -1: a spare
    n: int
    state: State
    collectives: int  # since the start of the attempt or set-up: comparable between ranks
    t_ns: int  # last progress
    t_work_ns: int = 0  # last sample in which the process or its children used the processor
    t_woken_ns: int = 0  # last sample with frequent wake-ups of the main thread
    waits: bool = False  # its main thread is known to wait for other ranks
    key: int = 0  # key of the current or last phase
    paces: Mapping[int, PhasePace] = {}  # by key, of phases that this process has completed
    letter: str
    stages: tuple[int, ...] = ()  # of a pipeline, that it has reported


def is_judged(look: WorkerObservation) -> bool:
    """Return whether to judge this worker's lack of progress; not for spares, for example."""
    return look.seat >= 0 and look.state not in _NEVER


def is_out(look: WorkerObservation) -> bool:
    """Return whether the rank was last observed outside any collective."""
    return look.state not in VOTE and not look.waits
