"""Backend "outlast" of torch.distributed, for processes with a seat and without one.

Groups of a process without a seat (`backend="outlast"` outside of `outlast run`) carry collectives
as those of a job do, in one generation that meets in the store of `init_process_group`. There is no
recovery: a lost peer raises torch's own error. A group that was made with `enable_reconfigure=True`
(torch 2.14 and newer) gets its members from torch's `reconfigure`, one generation each time.

In a process with a seat, groups that the script asks for by the names "gloo" and "nccl" are stable
groups as well, where torch looks its own backends up by name: from torch 2.14 on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from outlast.config import gloo_interface
from outlast.errors import GroupError, UnsupportedError, UsageError
from outlast.worker.groups.closed_answers import RankPlace
from outlast.worker.groups.device_drivers import has_nccl
from outlast.worker.groups.group_registry import GroupRegistry
from outlast.worker.groups.rendezvous import Mailbox, meeting_name
from outlast.worker.groups.stable_group import BACKEND, StableGroup
from outlast.worker.groups.work_handles import FinishedWork, opaque_class


def answered_names() -> list[str]:
    """Return the names of torch's backends that stable groups can answer to.

    torch before 2.14 opens its own backends without a look-up. Groups by these names are then
    refused in a run.
    """
    if not hasattr(dist.Backend, "_ensure_backend_registered"):  # torch has no public query
        return []
    return ["gloo", "nccl"] if has_nccl() else ["gloo"]


def register(groups: GroupRegistry) -> None:
    """Register "outlast" as a torch.distributed backend, served by `groups`, and all names that it
    answers to. Raises UsageError the second time: torch keeps a backend for the life of the
    process."""
    known = dist.Backend._plugins.get(BACKEND.upper())  # noqa: SLF001 - torch has no public query
    if known is not None and _is_of_a_seat(known.creator_fn):
        raise UsageError("the backend 'outlast' is registered already; a process has one seat")
    for name in (BACKEND, *answered_names()):
        answer(name, partial(_create, groups, name))


def answer(name: str, create: Callable[[Any, Any], StableGroup]) -> None:
    """Let `create` open the groups of backend `name`, from torch's options of a backend."""
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    list_as_self_recording(name)


def _create(groups: GroupRegistry, backend: str, options: Any, _: Any) -> StableGroup:
    return groups.adopt(
        str(options.group_id),
        tuple(options.global_ranks_in_group),
        options.group_rank,
        options.group_size,
        backend,
    )


def _is_of_a_seat(creator: Any) -> bool:
    return isinstance(creator, partial) and creator.func is _create


def list_as_self_recording(name: str) -> None:
    """Keep torch's flight recorder away from stable groups, which it cannot be attached to.

    torch 2.15 attaches it to groups whose backend is not listed. Inner groups record themselves.
    """
    if (recording := getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)) is not None:
        recording.add(name)


class StoreMailbox(Mailbox):
    """Rendezvous values of one generation, in a torch store that all its ranks share."""

    def __init__(self, store: Store) -> None:
        self._store: Any = store  # torch's stubs name other parameters than its C++ does
        self._peers: set[str] = set()
        super().__init__(lambda _: None)

    def know(self, addresses: Sequence[str]) -> None:
        """Set the gloo listeners of all ranks."""
        self._peers = set(addresses)

    def put(self, generation: int, key: str, value: bytes, ranks: Sequence[int]) -> None:  # noqa: ARG002
        """Set a value of this rank."""
        self._store.set(key, value)

    def meet(
        self,
        generation: int,  # noqa: ARG002
        name: str,
        value: bytes,
        parts: bytes,
        ranks: Sequence[int],
    ) -> None:
        """Give this rank's value and all parts to all ranks at once."""
        self._store.set(f"{name}{ranks.index(self.seat)}", value + parts)

    def listeners(self, generation: int) -> set[str]:  # noqa: ARG002
        """Return the gloo listeners of the other ranks."""
        return self._peers - {self.address}

    def move_to(self, store: Store) -> None:
        """Meet in another store from now on."""
        self._store = store

    def peek(self, generation: int, key: str) -> bytes | None:  # noqa: ARG002
        """Return a value if any rank has set it, else None."""
        return self._store.get(key) if self._store.check([key]) else None

    def get(self, generation: int, key: str, deadline_s: float) -> tuple[bytes, bytes]:  # noqa: ARG002
        """Wait for a value, which has no parts. Raises GroupError at the deadline (monotonic), or
        without a store."""
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            self._store.wait([key], timedelta(seconds=left_s))
            return self._store.get(key), b""
        except RuntimeError as error:
            raise GroupError(f"no rank has set {key!r} in the store: {error}") from error


class SeatlessGroups(GroupRegistry):
    """The registry of one group, which lives until the script destroys the group."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._meeting = StoreMailbox(store)
        super().__init__(
            mailbox=self._meeting,
            on_trouble=lambda _: None,
            on_collective=lambda _: None,
            timeout_s=timeout_s,
            copy_s=timeout_s,
            interface=gloo_interface() or None,
        )
        self._store = store
        self.make_group = SeatlessGroup
        self.record.stop()

    def meet(self, store: Store, place: RankPlace, timeout_s: float) -> None:
        """Connect the next generation, whose ranks are in `place` and meet in `store`. Raises
        GroupError if a rank does not connect within the time."""
        self.seat, self.world = place.rank, place.size
        self._meeting.seat = place.rank
        self._meeting.move_to(store)
        generation, deadline_s = self._generation + 1, time.monotonic() + timeout_s
        everybody = range(place.size)
        self._meeting.put(generation, f"listener/{place.rank}", self.address.encode(), everybody)
        self._meeting.know(
            [
                self._meeting.get(generation, f"listener/{rank}", deadline_s)[0].decode()
                for rank in everybody
            ]
        )
        self.connect(generation, max(0.001, deadline_s - time.monotonic()))

    def await_all(self, timeout_s: float) -> None:
        """Wait until all ranks of the generation are connected: a rank that left it earlier would
        break what others build. Raises GroupError at the time limit."""
        everybody, deadline_s = range(self.world), time.monotonic() + timeout_s
        self._meeting.put(self._generation, f"connected/{self.seat}", b"", everybody)
        for rank in everybody:
            self._meeting.get(self._generation, f"connected/{rank}", deadline_s)

    def follow(self, group: StableGroup) -> None:
        """Connect `group` in every later generation."""
        self._stable.append(group)

    def end_generation(self) -> None:
        """Wake all operations of the generation and drop its connections."""
        self.sever(self._generation)
        self.reap()

    def admit(self, op: str, group: str) -> bool:
        """Refuse a collective without connections. Raises GroupError."""
        raise GroupError(
            f"{op} on group {group!r}, which has no connections: it was aborted, or made with"
            " enable_reconfigure=True; nothing was sent; call reconfigure first"
        )

    def failed(self, error: BaseException) -> bool:  # noqa: ARG002
        """Return False: the caller gets torch's error."""
        return False

    def leave(self, group: StableGroup) -> None:  # noqa: ARG002
        """Drop the connections with the group."""
        self.shutdown()

    @classmethod
    def open(
        cls, store: Store, place: RankPlace, timeout_s: float, name: str, backend: str
    ) -> StableGroup:
        """Return the connected group of a new registry. Raises GroupError if a rank does not
        connect within the time."""
        groups = cls(store, timeout_s)
        groups.meet(store, place, timeout_s)
        return groups.adopt(name, tuple(range(place.size)), place.rank, place.size, backend)

    def split(self, number: int, name: str, place: RankPlace, backend: str) -> StableGroup:
        """Return a group of some ranks, which meet in this registry's store. `number` counts the
        splits. Raises GroupError if a rank does not connect within the time limit."""
        store = PrefixStore(f"split/{number}/{name}", self._store)
        return self.open(store, place, self._timeout_s, name, backend)


@opaque_class
class SeatlessGroup(StableGroup):
    """A group outside of a run."""

    _splits = 0

    def split_group(self, *args: Any, **kwargs: Any) -> StableGroup | None:
        """Return the group of some ranks of this one; it has connections of its own."""
        self._splits += 1  # on all ranks of this group: they split it together
        return super().split_group(*args, **kwargs)

    def _split(self, name: str, ranks: list[int]) -> StableGroup:
        groups: Any = self.registry
        place = RankPlace(ranks.index(self.place.rank), len(ranks))
        return groups.split(self._splits, name, place, self._backend)


@opaque_class
class ReconfigurableGroup(StableGroup):
    """A group outside of a run, whose members torch's `reconfigure` replaces (torch 2.14 on).

    A handle is unique to a process and a group. Members of a generation share a store, and meet
    there under the identifier that the caller gives the generation.
    """

    def __init__(
        self, groups: SeatlessGroups, store: Store, timeout_s: float, options: Any
    ) -> None:
        ranks = tuple(range(options.group_size))
        name, rank = str(options.group_id), options.group_rank
        super().__init__(groups, name, ranks, rank, meeting_name(ranks, 0))
        self._seatless, self._store, self._timeout_s = groups, store, timeout_s
        self._handle = f"{BACKEND}:{rank}:{uuid.uuid4().hex}"
        self._identifiers: set[int] = set()

    def getRank(self) -> int:  # noqa: N802 - the name that torch's C++ looks up
        return self.place.rank

    def getSize(self) -> int:  # noqa: N802 - the same
        return self.place.size

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: its ranks are renamed, and have not split it equally often."""
        raise UnsupportedError(
            "split_group of a group with enable_reconfigure=True cannot be numbered on members that"
            " joined later; nothing was sent; use new_group() with the same ranks"
        )

    @property
    def supports_reconfigure(self) -> bool:
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the name of this member, which callers of `reconfigure` exchange."""
        return self._handle

    def reconfigure(self, opts: Any) -> FinishedWork:
        """Leave the members of now and connect to those of `opts.handles`, ranked by their place in
        a list, or in order if it is a set. Raises UsageError for handles and identifiers that
        cannot be used, GroupError if a member does not connect in time."""
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if len(set(handles)) != len(handles) or self._handle not in handles:
            raise ReconfigureError(
                f"reconfigure({opts.uuid}) got {len(handles)} handles, of which"
                f" {handles.count(self._handle)} are of this member; nothing was changed; give each"
                " member's get_reconfigure_handle() once"
            )
        if opts.uuid in self._identifiers:
            raise ReconfigureError(
                f"reconfigure({opts.uuid}): the identifier was already used; nothing was changed;"
                " give each reconfiguration a new one"
            )
        self._identifiers.add(opts.uuid)
        timeout_s = opts.timeout.total_seconds() if opts.timeout else self._timeout_s
        self._seatless.end_generation()
        self.place = RankPlace(handles.index(self._handle), len(handles))
        self.ranks = tuple(range(len(handles)))
        self.meeting = meeting_name(self.ranks, 0)
        store = PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        self._seatless.meet(store, self.place, timeout_s)
        self._seatless.await_all(timeout_s)
        return FinishedWork([])


class ReconfigureError(UsageError, RuntimeError):
    """Handles or an identifier that `reconfigure` cannot use, a RuntimeError as of torch's own."""


def open_group(options: Any, _: Any = None, *, backend: str = BACKEND) -> StableGroup:
    """Return a connected group for torch's options of a backend. Raises GroupError if a rank
    does not connect within their timeout, ConfigError if gloo cannot listen."""
    list_as_self_recording(backend)
    timeout_s = options.timeout.total_seconds()
    if getattr(options, "enable_reconfigure", False):
        groups = SeatlessGroups(options.store, timeout_s)
        group = ReconfigurableGroup(groups, options.store, timeout_s, options)
        groups.follow(group)
        return group
    place = RankPlace(options.group_rank, options.group_size)
    return SeatlessGroups.open(options.store, place, timeout_s, str(options.group_id), backend)
