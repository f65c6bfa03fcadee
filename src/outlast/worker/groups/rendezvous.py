"""Rendezvous of the ranks of a generation over the control channel, and its deadline.

It replaces TCPStore. A `set` publishes a value to all ranks; a `get` waits until the value is
delivered, the generation is closed, or the deadline has passed.

Most steps of building a group wait for such values, and `close` ends these waits at once. Once all
addresses are known, however, gloo waits for each peer's connection without a way to stop. A peer
that is lost or severed in these milliseconds never connects. `BuildGuard` ends that wait.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Condition

import xxhash
from torch._C._distributed_c10d import Store

from outlast.errors import GroupError, UnsupportedError, WireError
from outlast.transport import messages
from outlast.transport.rank_spans import pack_ranks
from outlast.transport.rendezvous_messages import PART_BYTES
from outlast.worker.groups.gloo_device import GlooDevice

_GENERATION_BYTES_MAX = 256 << 20
_LENGTH = struct.Struct("=Q")
_RANKS_TEXT_MAX = 64


def meeting_name(ranks: tuple[int, ...], earlier: int) -> str:
    """Return the name under which `ranks` connect a group, after `earlier` groups of the same
    ranks.

    Members create their shared groups in the same order, so the name is equal on all of them.
    torch's own names can differ: their numbers restart once all groups are destroyed. From torch
    2.14 on they also count groups that only their members create (`use_local_synchronization`).
    """
    text = ",".join(map(str, ranks))
    first, last = min(ranks), max(ranks)
    if len(ranks) > 1 and ranks == tuple(range(first, last + 1)):
        text = f"{first}-{last}"
    elif len(text) > _RANKS_TEXT_MAX:
        text = f"{first}-{last} of {len(ranks)} {xxhash.xxh3_64_hexdigest(text.encode())}"
    return f"ranks {text}" + (f" #{earlier + 1}" if earlier else "")


class Mailbox:
    """Rendezvous values by generation. Filled by the control thread, read by the main thread.

    `seat` is this process's rank, and `address` its gloo listener, which peers learn with each
    value: whoever has not published anything to this rank is not connected to it.
    """

    def __init__(self, publish: Callable[[messages.Put | messages.Meet], None]) -> None:
        self._publish = publish
        self.seat, self.address = -1, ""
        self._changed = Condition()
        self._values: dict[int, dict[str, tuple[bytes, dict[int, bytes]]]] = {}
        self._listeners: dict[int, set[str]] = {}
        self._sizes: dict[int, int] = {}
        self._closed_to = 0
        self._oldest = 0

    def put(self, generation: int, key: str, value: bytes, ranks: Sequence[int]) -> None:
        """Store this rank's value, and publish it to `ranks`."""
        self._keep(generation, key, (value, {}))
        self._publish(
            messages.Put(
                generation=generation,
                key=key,
                value=value,
                ranks=pack_ranks(ranks),
                address=self.address,
            )
        )

    def meet(
        self, generation: int, name: str, value: bytes, parts: bytes, ranks: Sequence[int]
    ) -> None:
        """Give all `ranks` this rank's value and their parts, once all of them do so. Their values
        have the keys "NAME0", "NAME1" and so on."""
        self._publish(
            messages.Meet(
                generation=generation,
                name=name,
                ranks=pack_ranks(ranks),
                value=value,
                parts=parts,
                address=self.address,
            )
        )

    def deliver(self, body: messages.RendezvousValue | messages.Met) -> None:
        """Store values of other ranks; drop those of earlier generations."""
        is_one = isinstance(body, messages.RendezvousValue)
        with self._changed:
            if body.generation >= self._oldest:
                addresses = (body.address,) if is_one else body.addresses
                self._listeners.setdefault(body.generation, set()).update(addresses)
        if is_one:
            self._keep(body.generation, body.key, (body.value, {}))
            return
        for place, value in enumerate(body.values):
            mine = slice(PART_BYTES * place, PART_BYTES * (place + 1))
            parts = {seat: data[mine] for seat, data in body.parts.items()}
            self._keep(body.generation, f"{body.name}{place}", (value, parts))

    def listeners(self, generation: int) -> set[str]:
        """Return the gloo listeners of the ranks that have published values to this one."""
        with self._changed:
            return self._listeners.get(generation, set()) - {self.address}

    def _keep(self, generation: int, key: str, value: tuple[bytes, dict[int, bytes]]) -> None:
        with self._changed:
            if generation < self._oldest:
                return
            before = self._values.get(generation, {}).get(key)
            freed = 0 if before is None else len(key) + len(before[0])
            size = self._sizes.get(generation, 0) + len(key) + len(value[0]) - freed
            if size > _GENERATION_BYTES_MAX:
                self._closed_to = max(self._closed_to, generation)  # connect() raises
            else:
                self._sizes[generation] = size
                self._values.setdefault(generation, {})[key] = value
            self._changed.notify_all()

    def peek(self, generation: int, key: str) -> bytes | None:
        """Return a value if it has arrived, else None."""
        with self._changed:
            found = self._values.get(generation, {}).get(key)
            return None if found is None else found[0]

    def get(self, generation: int, key: str, deadline_s: float) -> tuple[bytes, bytes]:
        """Wait for a value; return it with the part that is this rank's alone. `deadline_s` is on
        the monotonic clock. Raises GroupError when the generation is closed or the deadline has
        passed."""
        with self._changed:
            while True:
                if generation <= self._closed_to:
                    raise GroupError(
                        f"generation {generation} was closed while this rank waited for {key!r};"
                        " the next generation connects anew"
                    )
                if (found := self._values.get(generation, {}).get(key)) is not None:
                    value, parts = found
                    if parts and self.seat not in parts:
                        raise GroupError(
                            f"{key!r} has no part for rank {self.seat}: {sorted(parts)}"
                        )
                    return value, parts.get(self.seat, b"")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise GroupError(
                        f"no rank has published {key!r} for generation {generation} in time:"
                        " its worker is lost or has not reached the same group"
                    )
                self._changed.wait(left_s)

    def open(self, generation: int) -> None:
        """Drop the values of generations before this one."""
        with self._changed:
            self._oldest = generation
            for old in [number for number in self._values if number < generation]:
                del self._values[old]
                self._sizes.pop(old, None)
            for old in [number for number in self._listeners if number < generation]:
                del self._listeners[old]

    def close(self, generation: int) -> None:
        """End all waits for values of this generation and of older ones with GroupError."""
        with self._changed:
            self._closed_to = max(self._closed_to, generation)
            self._changed.notify_all()


class GenerationNotes:
    """Notes of the ranks of one group in the connected generation: what was posted before is
    gone."""

    def __init__(
        self,
        mailbox: Mailbox,
        generation: Callable[[], int],
        name: str,
        rank: int,
        ranks: Sequence[int],
    ) -> None:
        self._mailbox, self._generation = mailbox, generation
        self._name, self._rank, self._ranks = name, rank, ranks

    def post(self, slot: int, data: bytes) -> None:
        """Replace this rank's note in `slot`. Never waits."""
        with suppress(WireError):  # without its agent this process ends
            self._mailbox.put(self._generation(), self._key(slot, self._rank), data, self._ranks)

    def posted(self, slot: int, rank: int) -> bytes:
        """Return a rank's note in `slot`, b"" if there is none."""
        return self._mailbox.peek(self._generation(), self._key(slot, rank)) or b""

    def _key(self, slot: int, rank: int) -> str:
        return f"{self._name}/{slot}/{rank}"


class JoinStore(Store):
    """Store of one inner group of one generation, backed by the mailbox.

    Each rank publishes its gloo address with one number for each peer. Peers receive the address
    and their own number, and read zeros for the others: N ranks get N^2 numbers, and not N^3.
    """

    def __init__(
        self, mailbox: Mailbox, generation: int, name: str, ranks: Sequence[int], deadline_s: float
    ) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._generation = generation
        self._name = name
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._wait_s = 0.0
        self.published: dict[str, bytes] = {}  # by this rank

    def extend(self, wait_s: float) -> None:
        """Give each later `get` its own time limit (NCCL connects at its first collective)."""
        self._wait_s = wait_s

    def set(self, key: str, value: bytes | str) -> None:
        """Publish a value to the other ranks."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.published[key] = data
        at, place = _numbers_at(data, len(self._ranks)), str(self._ranks.index(self._mailbox.seat))
        if at < len(data) and key.endswith(place):
            name = self._key(key.removesuffix(place))
            self._mailbox.meet(self._generation, name, data[:at], data[at:], self._ranks)
        else:
            self._mailbox.put(self._generation, self._key(key), data, self._ranks)

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""
        if key in self.published:
            return self.published[key]
        deadline_s = time.monotonic() + self._wait_s if self._wait_s else self._deadline_s
        value, part = self._mailbox.get(self._generation, self._key(key), deadline_s)
        if not part:
            return value
        before = PART_BYTES * self._ranks.index(self._mailbox.seat)
        after = PART_BYTES * len(self._ranks) - before - len(part)
        return value + bytes(before) + part + bytes(after)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002 - the generation's deadline applies
        """Wait until all keys have values."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return all(
            key in self.published
            or self._mailbox.peek(self._generation, self._key(key)) is not None
            for key in keys
        )

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the generation's deadline applies."""

    def has_extended_api(self) -> bool:
        """Return False: append and multi-get are not supported."""
        return False

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"


class JobStore(Store):
    """Store for `init_process_group`, which refuses every use. Outlast does not use it; a caller is
    a process group that cannot survive a lost worker."""

    def set(self, key: str, value: bytes | str) -> None:  # noqa: ARG002
        """Refuse: only a process group of another backend calls this."""
        raise _foreign(key)

    def get(self, key: str) -> bytes:
        """Refuse: only a process group of another backend calls this."""
        raise _foreign(key)

    def add(self, key: str, value: int) -> int:  # noqa: ARG002
        """Refuse: only a process group of another backend calls this."""
        raise _foreign(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Refuse: only a process group of another backend calls this."""
        raise _foreign(", ".join(keys))

    def check(self, keys: list[str]) -> bool:
        """Refuse: only a process group of another backend calls this."""
        raise _foreign(", ".join(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no `get` waits."""

    def has_extended_api(self) -> bool:
        """Return False: append and multi-get are not supported."""
        return False


def _numbers_at(value: bytes, size: int) -> int:
    """Return where the numbers for the peers begin in a value of gloo, a rank's host and address
    behind their lengths; the end of any other value."""
    try:
        (host,) = _LENGTH.unpack_from(value)
        (address,) = _LENGTH.unpack_from(value, _LENGTH.size + host)
    except struct.error:
        return len(value)
    at = 2 * _LENGTH.size + host + address
    return at if len(value) == at + PART_BYTES * size else len(value)


def _foreign(key: str) -> UnsupportedError:
    return UnsupportedError(
        f"something asked the job's store for {key!r}: a process group of another backend (one of"
        " torch's own classes, symmetric memory, a split; before torch 2.14 also"
        ' new_group(backend="gloo")) cannot survive a lost worker and is refused; leave out'
        ' backend=, or use backend="outlast"'
    )


_GRACE_S = 0.05  # connections in progress complete within this time
SEARCH_S = 3.0  # of a peer that does not connect; also the pause before and between searches


class BuildGuard:
    """Context that bounds the building of groups; `deadline_s` is on the monotonic clock. It ends
    at once when a peer's host turns out to be out of reach: `unreachable` has its listeners."""

    def __init__(
        self, device: GlooDevice, deadline_s: float, mailbox: Mailbox, generation: int
    ) -> None:
        self.deadline_s = deadline_s
        self.unreachable: frozenset[str] = frozenset()
        self._device, self._mailbox, self._generation = device, mailbox, generation
        self._stirred = threading.Event()
        self._done = threading.Event()
        self._current: tuple[JoinStore, int, int] | None = None
        self._thread = threading.Thread(target=self._watch, name="outlast-build", daemon=True)

    def __enter__(self) -> BuildGuard:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._done.set()
        self._stirred.set()
        self._thread.join()
        if self.unreachable and (error is None or isinstance(error, GroupError)):
            names = ", ".join(sorted(self.unreachable))
            raise GroupError(f"no answer from {names} within {SEARCH_S:g} s") from error

    def building(self, store: JoinStore, rank: int, size: int) -> None:
        """Set the group that is being built."""
        self._current = (store, rank, size)

    def stir(self) -> None:
        """Free a building group that waits for connections, since its generation is closed.
        Thread-safe."""
        self._stirred.set()

    def _watch(self) -> None:
        while not self._stirred.wait(min(SEARCH_S, max(0.0, self.deadline_s - time.monotonic()))):
            if time.monotonic() >= self.deadline_s:
                break
            peers = self._mailbox.listeners(self._generation)
            found = self._device.unreachable(peers, SEARCH_S, self._stirred.is_set)
            self.unreachable = frozenset(found)
            if found:
                self._mailbox.close(self._generation)
                break
        freed: JoinStore | None = None
        while not self._done.wait(_GRACE_S):
            self._device.end_attempts(self._mailbox.listeners(self._generation))
            current = self._current
            if current is not None and current[0] is not freed:
                freed = current[0]
                self._device.release(_tickets(*current))


def _tickets(store: JoinStore, rank: int, size: int) -> list[int]:
    """Return the peers' connection numbers, from the end of the address that gloo published."""
    for value in store.published.values():
        if len(value) > 8 * size:
            numbers = struct.unpack(f"={size}q", value[-8 * size :])
            return [number for peer, number in enumerate(numbers) if peer != rank]
    return []
