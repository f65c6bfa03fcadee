"""Pending operations: slow ones are neither connection failures nor hangs."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.futures import Future

from outlast.config import Limits
from outlast.errors import GroupError
from outlast.worker.groups.pending_works import PendingWorks
from outlast.worker.worker_process import WorkerProcess

pytestmark = pytest.mark.process


class _LateNews(dist.Work):
    """A real work whose time-outs take long to be told: it has completed when they are."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work, self.late = work, 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            return self.work.wait(timeout) if timeout else self.work.wait()
        except RuntimeError:
            deadline_s = time.monotonic() + 30
            while not self.work.is_completed() and time.monotonic() < deadline_s:
                threading.Event().wait(0.01)
            self.late += 1
            raise

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _completes_late(member: Any) -> int:
    member.init()
    control = member.groups._control
    if member.rank == 0:
        threading.Event().wait(0.6)
    total = torch.ones(1)
    work = _LateNews(control._group(0).allreduce([total], dist.AllreduceOptions()))
    control._wait(work)
    assert total.item() == 2
    assert member.groups.vote("on")
    return work.late


def test_what_completes_while_its_look_up_ends_has_ended_well(cluster: Any) -> None:
    assert cluster.run(2, _completes_late) == [0, 1]


def _slow_rank(member: Any) -> str:
    """A vote waits for the slowest rank; a copy that nobody sends ends by its own deadline."""
    member.groups._copy_s = 0.3
    member.init()
    if member.rank == 0:
        threading.Event().wait(1.0)
    assert member.groups.vote("late")
    if member.rank == 0:
        member.say("waiting")
        assert member.told.get(timeout=30) == "go"
        return "waited for"
    started_s = time.monotonic()
    with pytest.raises(GroupError, match="copy from seat 0"):
        member.groups.controls().recv(torch.zeros(4), 0, 7)
    member.say("ended")
    return "in time" if time.monotonic() - started_s < 10 else "late"


def test_copies_have_a_deadline_of_their_own(cluster: Any) -> None:
    cluster.fork(2, _slow_rank)
    cluster.expect("waiting", 1)
    cluster.expect("ended", 1)
    cluster.tell("go", [0])
    assert cluster.join(timeout_s=60) == ["waited for", "in time"]


def _as_a_worker(member: Any) -> list[float]:
    worker = WorkerProcess(None)
    try:
        return [worker.groups._timeout_s, worker.groups._copy_s]
    finally:
        worker.groups.shutdown()


def test_a_workers_collectives_outlast_the_hang_watch(cluster: Any) -> None:
    """Else a rank that waits for a slow one would break what the watch still allows."""
    ((timeout_s, copy_s),) = cluster.run(1, _as_a_worker)
    limits = Limits()
    assert timeout_s >= 2 * limits.hang_ceiling_s
    assert copy_s == limits.transfer_s


def _forgotten_copy(member: Any) -> list[int]:
    """gloo does not let go of a donor's send: as if its connections had not been cut."""
    member.init()
    groups = member.groups
    if member.rank:
        assert member.told.get(timeout=30) == "go"
        return []
    copy = threading.Thread(target=_copy, args=(member,))
    copy.start()
    deadline_s = time.monotonic() + 30
    while not groups._control.busy and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    cut, groups._device.cut = groups._device.cut, lambda _: 0
    before = groups.stuck(1)
    groups.sever(1)
    held = groups.stuck(1)
    cut(groups._mailbox.listeners(1))
    copy.join(30)
    member.say("done")
    return [before, held, groups.stuck(1)]


def _copy(member: Any) -> None:
    with pytest.raises(GroupError, match="copy to seat 1"):
        member.groups.controls().send(torch.ones(30_000_000), 1, 3)


def test_a_copy_that_gloo_holds_is_stuck(cluster: Any) -> None:
    cluster.fork(2, _forgotten_copy)
    cluster.expect("done", 1)
    cluster.tell("go", [1])
    assert cluster.join(timeout_s=60)[0] == [0, 1, 0]


def _issued(member: Any) -> list[int]:
    """Compute between issue and wait: nobody waits in these works yet."""
    member.init()
    groups, one = member.groups, torch.ones(2)
    if member.rank:
        assert member.told.get(timeout=30) == "go"
        return []
    works = [
        dist.irecv(one, 1),
        dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2, async_op=True),
    ]
    assert groups.unfinished() == 2
    cut, groups._device.cut = groups._device.cut, lambda _: 0
    groups.sever(1)
    idle = groups.stuck(1)
    waits = [threading.Thread(target=_fails, args=(work,)) for work in works]
    for wait in waits:
        wait.start()
    deadline_s = time.monotonic() + 30
    while groups.stuck(1) < 2 and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    waited_for = groups.stuck(1)
    cut(groups._mailbox.listeners(1))
    for wait in waits:
        wait.join(30)
    member.say("done")
    return [idle, waited_for, groups.stuck(1)]


def _fails(work: dist.Work) -> None:
    with pytest.raises(RuntimeError):
        work.wait()


def test_who_computes_before_its_wait_is_not_stuck(cluster: Any) -> None:
    cluster.fork(2, _issued)
    cluster.expect("done", 1)
    cluster.tell("go", [1])
    assert cluster.join(timeout_s=60)[0] == [0, 2, 0]


class _Queued(dist.Work):
    """As NCCL's: the future is complete once the call is queued, the work when the device says."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def is_completed(self) -> bool:
        return self.ended

    def get_future(self) -> Any:
        future: Future[list[torch.Tensor]] = Future()
        future.set_result([])
        return future

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise AssertionError("the host waits, and DDP loses its overlap")


@pytest.mark.parametrize("op", ["allreduce", "recv", "reduce_scatter"])
def test_on_a_device_the_end_is_what_the_device_says(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, work, waits = PendingWorks(lambda _: None), _Queued(), []
    works.add(op, work, [], on_cpu=False)
    works.on_device()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    works.prune()
    assert works.running() == works.stuck() == 1
    assert works.unfinished() == 1
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: setattr(work, "ended", True))
    works.on_device()
    assert works.unfinished() == 0
    assert waits == [1]


NUMBERS = ("_get_op_type", "_get_sequence_number", "_get_duration", "source_rank")


def _numbers(member: Any, backend: str, store: str) -> list[Any]:
    """Return what works tell about themselves, and the number of the group's last operation."""
    member.init(backend, store)
    tensor, peer = torch.ones(4), 1 - member.rank
    last = dist.group.WORLD._get_sequence_number_for_group
    found: list[Any] = [last()]

    def add(work: Any) -> None:
        work.wait()
        for name in NUMBERS:
            try:
                value: Any = getattr(work, name)
                found.append(str(value() if callable(value) else value))
            except (RuntimeError, AttributeError) as error:
                found.append(type(error).__name__)
        found.append(last())

    add(dist.all_reduce(tensor, async_op=True))
    add(dist.isend(tensor, peer) if member.rank else dist.irecv(tensor, peer))
    add(dist.isend(tensor, peer) if member.rank else dist.irecv(tensor))
    add(dist.reduce_scatter_single(tensor[:2], tensor, async_op=True))
    add(dist.gather(tensor, [tensor, tensor] if member.rank else None, 1, async_op=True))
    dist.barrier()
    return found


def test_numbers_of_works_equal_those_of_plain_gloo(clusters: Any, tmp_path: Path) -> None:
    plain, *ours = (
        clusters().run(2, _numbers, backend, str(tmp_path / backend))
        for backend in ("gloo", "outlast", "seatless")
    )
    assert plain[0][0] == 0 and plain[0][-1] == 5
    assert ours == [plain, plain]


def _left_behind(member: Any) -> list[int]:
    """Start functional collectives that nobody waits for, since the generation is severed."""
    member.init()
    dist.barrier()
    registered, functional = (
        torch._C._distributed_c10d._get_work_registry_size,
        torch.ops._c10d_functional,
    )
    found = []
    if member.rank == 0:  # the other rank takes no part
        outputs = [
            functional.all_reduce(torch.ones(9), "sum", "0"),
            functional.all_gather_into_tensor(torch.ones(9), 2, "0"),
            functional.reduce_scatter_tensor(torch.ones(8), "sum", 2, "0"),
        ]
        found.append(registered())
        del outputs
    member.say("started")
    assert member.told.get(timeout=60)
    member.connect(2)
    while member.groups.reap():
        pass
    return [*found, registered()]


def test_torch_keeps_no_works_of_a_severed_generation(cluster: Any) -> None:
    cluster.fork(2, _left_behind)
    cluster.expect("started", 2)
    cluster.sever(1)
    cluster.tell(True)
    assert cluster.join() == [[3, 0], [0]]
