"""A hot spare: a worker that runs its script before it has a rank (docs/hot-spares.md).

| the script | a hot spare without a seat |
|---|---|
| `init()` | waits for Prepare, or for a seat; then makes groups that answer by themselves |
| builds its model, `protect()` | does the same |
| `batches()` | takes the dry steps that a rank has described, and waits for a seat |
| makes device meshes, `fully_shard` | does so for a stand-in, which is moved to the rank later |
| reads the rank, makes other groups, overwrites files, `run()`, `shared()` | waits for a seat |

With its seat it is a joiner as any other: the walk, the transfer and the digests are the same.
"""

from __future__ import annotations

import copy
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from outlast.config import WHOLE_ENVIRONMENT, WorkerSettings, set_world, watch_environment
from outlast.errors import GaveUpError
from outlast.transport import messages
from outlast.worker.batch_loop import BatchLoop
from outlast.worker.compute_environment import hello, is_unassigned
from outlast.worker.groups import SetupRecord, unseated_mesh
from outlast.worker.groups.stable_group import StableGroup
from outlast.worker.groups.unseated_group import PendingRank, UnseatedGroup
from outlast.worker.groups.unseated_mesh import UnseatedMeshes, is_moved, rows_of
from outlast.worker.phases.step_calls import bind, decode_calls, variables_of
from outlast.worker.script.bytecode import is_call_of_script
from outlast.worker.script.coordinate_readers import find_coordinate_reader
from outlast.worker.state.protected_state import ProtectedState
from outlast.worker.worker_process import WorkerProcess

_RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK"})


class HotWorker(WorkerProcess):
    """The process behind the Session of a spare whose script promises to keep no rank."""

    def __init__(self, settings: WorkerSettings | None) -> None:
        self._seat = -1
        self._request: messages.Prepare | None = None  # while it is prepared without a seat
        self._stand_in = 0
        self._groups_without_rank: list[UnseatedGroup] = []
        self._end_watch: Callable[[], None] = lambda: None
        super().__init__(settings)

    @property
    def seat(self) -> int:
        """Return the rank; wait for it if there is none."""
        return self.await_seat("the rank (session.rank)") if self._request else self._seat

    @seat.setter
    def seat(self, seat: int) -> None:
        self._seat = seat

    @property
    def local_rank(self) -> int:
        """Return the local rank; wait for the seat if there is none."""
        if self._request:
            self.await_seat("the local rank (session.local_rank)")
        return self._local_rank

    @local_rank.setter
    def local_rank(self, local_rank: int) -> None:
        self._local_rank = local_rank

    def take_seat(self) -> None:
        """Wait for a seat, or make the process group without one when asked to prepare."""
        self._reach_init()
        body = self._wait_for_request()
        if isinstance(body, messages.Seat):
            self._sit(body)
        else:
            self._prepare(body)

    def _greet(self) -> None:
        greeting = hello(self.device, self.groups.address)
        can_be_hot = not is_unassigned(self.device)
        self.link.send(msgspec.structs.replace(greeting, hot=can_be_hot))

    def _wait_for_request(self) -> messages.Seat | messages.Prepare:
        request: messages.Prepare | None = None
        while True:  # a spare waits as long as the run lasts; the link's end ends it
            try:
                body = self.status.inbox.get(timeout=0.0 if request else 60.0)
            except queue.Empty:
                if request is not None:
                    return request
                continue
            if isinstance(body, messages.Seat):  # also one that came right behind Prepare
                return body
            if isinstance(body, messages.Prepare):
                request = body
            elif isinstance(body, messages.Stop):
                raise SystemExit(0)

    # --- without a seat ---

    def _prepare(self, request: messages.Prepare) -> None:
        self.world = request.world
        self.status.joining = True
        set_world(request.world)
        self.groups.make_group = self._make_group
        self.groups.record = SetupRecord.decode(request.record)
        self._stand_in = max(request.stand_in, 0)
        self.groups.take_seat(self._stand_in, request.world, dry=True)
        self._request = request
        self._make_process_group(self._stand_in, request.world)
        self.start_files.begin()
        self.start_files.before_move = lambda: self._need_seat("a file that the script overwrites")
        self._end_watch = watch_environment(_RANK_VARIABLES, self._on_variable_read)

    def _on_variable_read(self, name: str) -> None:
        if name != WHOLE_ENVIRONMENT:
            self._need_seat(f"the environment variable {name}")
        elif is_call_of_script():  # libraries copy it for their children
            self._need_seat("all environment variables")

    def _make_group(
        self, groups: Any, name: str, ranks: tuple[int, ...], rank: int, meeting: str, backend: str
    ) -> StableGroup:
        request = self._request
        can_move = request is not None and request.stand_in >= 0 and unseated_mesh.CAN_MOVE
        if request is not None and len(ranks) < self.world and not can_move:
            rank, request = ranks.index(self.await_seat("a group of some ranks")), None
        if request is None:
            return StableGroup(groups, name, ranks, rank, meeting, backend)
        group = UnseatedGroup(groups, name, ranks, rank, meeting, backend)
        group.wait, group.rows = self.await_seat, rows_of(sys._getframe(1), ranks)  # noqa: SLF001
        if can_move:
            group.is_moved = is_moved
        self._groups_without_rank.append(group)
        return group

    def _need_seat(self, place: str) -> None:
        if self._request is not None and threading.current_thread() is threading.main_thread():
            self.await_seat(place)

    def await_seat(self, place: str) -> int:
        """Wait for a seat and take it; return the rank. `place`: what needs the rank.

        Raises GaveUpError if what was built does not fit the seat.
        """
        if self._request is None:
            return self._seat
        request, self._request = self._request, None  # what follows is this worker's own
        self._end_watch()
        self.start_files.before_move = lambda: None
        meshes = UnseatedMeshes(self._groups_without_rank, self._stand_in, self.world)
        fits, reason = self._find_fitting(meshes)
        self.note(
            f"this hot spare is prepared up to {place}{reason}, and waits for a seat",
            warning=False,
        )
        self.send(messages.WorkerReady(generation=0, n=0, fits=fits))
        body, device = self._wait_for_seat(), self.device
        if body.first or body.record != request.record or body.world != request.world:
            raise GaveUpError(
                "this hot spare was prepared for another start of the job, or with other results of"
                " set-up collectives; a warm one replaces it"
            )
        if fits and body.seat not in fits:
            raise GaveUpError(
                f"this hot spare built its device meshes as rank {self._stand_in}, and does not fit"
                f" rank {body.seat}; a warm one replaces it"
            )
        self._note_seat(body)
        if self.device != device:
            raise GaveUpError(
                f"this hot spare was prepared on {device}, and its seat is on {self.device}; a warm"
                " one replaces it"
            )
        self._walk(dict(body.slots), body.n)
        self.groups.take_seat(body.seat, body.world, dry=True)
        meshes.move(body.seat)
        torch_c: Any = torch._C  # noqa: SLF001 - as torch's own init does; its stubs lack it
        torch_c._distributed_c10d._set_global_rank(body.seat)  # noqa: SLF001
        self._enter_setup(first=False)
        if self.phases.protected is not None:
            self.report_schema(self.phases.protected)
        return self._seat

    def _find_fitting(self, meshes: UnseatedMeshes) -> tuple[tuple[int, ...], str]:
        """Return the ranks that this process can take, () for all, and words on the reason."""
        if not meshes:
            return (), ""
        if reader := find_coordinate_reader():
            return (self._stand_in,), f" as rank {self._stand_in} alone ({reader} may keep it)"
        fits = meshes.fitting()
        others = ", ".join(map(str, fits))
        return fits, f" as rank {self._stand_in}, for ranks {others}"

    # --- the script's calls ---

    def report_schema(self, protected: ProtectedState) -> None:
        """Report the schema, once there is a seat to which it belongs."""
        if self._request is None:
            super().report_schema(protected)

    def run(
        self, key: str, function: Callable[..., Any], call: Callable[[], Any], *, undo: bool
    ) -> Any:
        """Run a phase, as a joiner does."""
        self.await_seat("the first phase")
        return super().run(key, function, call, undo=undo)

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that one rank makes for all."""
        self.await_seat(f"the shared value {name!r}")
        return super().shared(name, make)

    def enter_loop(self, loader: Any) -> BatchLoop:
        """Take dry steps without a seat, then return the loop as a joiner does."""
        protected = self.phases.protected
        if self._request is not None and protected is not None:
            script = sys._getframe(2)  # noqa: SLF001 - the caller of Session.batches or epochs
            known = next((each for each in protected.loaders if each is not None), None)
            self._take_dry_steps(self._request.calls, loader or known, script)
        self.await_seat("the training loop")
        for sampler in _samplers_of(loader):
            if isinstance(sampler.rank, PendingRank):
                sampler.rank = self._seat
        return super().enter_loop(loader)

    def _take_dry_steps(self, calls: bytes, loader: Any, script: FrameType) -> None:
        batch = _batch_like(loader)
        if batch is None:
            return
        with suppress(msgspec.DecodeError):
            for described in decode_calls(calls):
                call = bind(described, batch[0], variables_of(script))
                if call is not None:
                    self.phases.joining.warm_up(call, described.key)


def _samplers_of(loader: Any) -> list[Any]:
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]
    return [each for each in candidates if hasattr(each, "rank")]


def _batch_like(loader: Any) -> tuple[Any] | None:
    """Return a batch of the first samples, whichever the sampler would choose; None where a loader
    cannot give one without being moved. Attributes that the dataset binds anew stay the same."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    size = loader.batch_size
    if size is None:
        return None
    try:
        dataset: Dataset[Any] = copy.copy(loader.dataset)
        return (loader.collate_fn([dataset[index] for index in range(size)]),)
    except Exception:  # noqa: BLE001 - a guess at the dataset's indices; without it no dry step
        return None
