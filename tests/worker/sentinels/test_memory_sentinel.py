"""Allocations that fail: what counts as one, batches in parts, and what ranks learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outlast import events
from outlast.worker.sentinels.batch_parts import common_size, cut_rows
from outlast.worker.sentinels.memory_sentinel import (
    LASTING,
    MemorySentinel,
    MemoryWord,
    is_out_of_memory,
)
from outlast.worker.sentinels.optimizer_memory import StateOffload
from outlast.worker.worker_events import WorkerEvents


class Stage:
    """A sentinel with a place that the test moves, and what it reports."""

    def __init__(self, *, static: bool = False, reducers: tuple[Any, ...] = ()) -> None:
        self.status: Any = SimpleNamespace(n=0)
        self.timeline = WorkerEvents(None, "w1-0")
        self.emitted: list[events.AnyEvent] = []
        self.timeline._emit = self.emitted.append
        tree = SimpleNamespace(reducers=list(reducers))
        reductions = SimpleNamespace(is_static=static)
        state: Any = SimpleNamespace(reducers=reductions, tree=tree, optimizers={})
        self.optimizers = state.optimizers
        owner: Any = SimpleNamespace(protected_state=lambda: state)
        self.is_real = True
        self.sentinel = MemorySentinel(self.status, self.timeline, owner, lambda: self.is_real)

    def fail(self, times: int = 1) -> None:
        for _ in range(times):
            self.sentinel.begin()
            try:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            except torch.OutOfMemoryError as error:
                self.sentinel.failed(error)

    def run(self, batch: Any) -> list[tuple[Any, float]]:
        self.sentinel.begin()
        found = list(self.sentinel.split(batch))
        self.sentinel.completed(self.status.n + 1, is_step=True)
        self.status.n += 1
        return found


def test_a_real_failed_allocation_counts() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(90000 << 30, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, counts: bool) -> None:
    assert is_out_of_memory(error) is counts


def test_a_batch_is_whole_until_the_second_failure() -> None:
    stage, batch = Stage(), torch.arange(8.0)
    ((whole, share),) = stage.sentinel.split(batch)
    assert whole is batch and share == 1.0
    stage.fail()
    assert len(list(stage.sentinel.split(batch))) == 1
    stage.fail()
    parts = list(stage.sentinel.split(batch))
    assert [part.tolist() for part, _ in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stage.sentinel.place == " in 2 parts"
    stage.fail()
    assert len(list(stage.sentinel.split(batch))) == 4
    stage.status.n = 1
    assert len(list(stage.sentinel.split(batch))) == 1, "of that phase alone"


def test_dry_runs_are_whole() -> None:
    stage = Stage()
    stage.fail(2)
    stage.is_real = False
    assert len(list(stage.sentinel.split(torch.ones(4)))) == 1


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(1.0), torch.ones(1, 3), [torch.ones(4), torch.ones(5)], [], None, "text",
        {"a": torch.ones(0)}, [torch.ones(4), torch.tensor(2.0)],
    ],
)  # fmt: skip
def test_what_has_no_rows_stays_whole(batch: Any) -> None:
    stage = Stage()
    stage.fail(2)
    ((part, share),) = stage.sentinel.split(batch)
    assert part is batch and share == 1.0 and stage.sentinel.place == ""


def test_a_static_graph_stays_whole() -> None:
    stage = Stage(static=True)
    stage.fail(2)
    assert len(list(stage.sentinel.split(torch.ones(4)))) == 1


@given(st.integers(2, 40), st.integers(2, 6))
def test_parts_have_all_rows_once_in_order_and_shares_sum_to_one(rows: int, failures: int) -> None:
    stage = Stage()
    stage.sentinel.learn([MemoryWord(), MemoryWord(n=0, failures=failures)])
    names = [str(row) for row in range(rows)]
    batch = {"x": torch.arange(rows), "more": (torch.arange(rows), names), "flag": True}
    found = list(stage.sentinel.split(batch))
    assert len(found) == min(rows, 2 ** (failures - 1))
    assert torch.cat([part["x"] for part, _ in found]).tolist() == list(range(rows))
    assert [name for part, _ in found for name in part["more"][1]] == names
    assert all(part["x"].equal(part["more"][0]) and part["flag"] for part, _ in found)
    assert sum(share for _, share in found) == pytest.approx(1.0)


def test_ddp_reduces_in_the_last_part_and_again_behind_an_attempt_that_was_cut() -> None:
    module = SimpleNamespace(require_backward_grad_sync=True)
    stage = Stage(reducers=(module,))
    stage.fail(2)
    stage.sentinel.begin()
    syncs = [module.require_backward_grad_sync for _ in stage.sentinel.split(torch.ones(4))]
    assert syncs == [False, True] and module.require_backward_grad_sync
    cut = stage.sentinel.split(torch.ones(4))
    next(cut)  # another rank's failure unwinds the function here
    assert not module.require_backward_grad_sync
    stage.sentinel.begin()
    assert module.require_backward_grad_sync
    again = stage.sentinel.split(torch.ones(4))
    next(again)
    del cut  # the frame of the old attempt goes late
    assert not module.require_backward_grad_sync
    list(again)
    assert module.require_backward_grad_sync


def test_ranks_learn_of_the_same_phase_alone() -> None:
    stage = Stage()
    stage.status.n = 5
    stage.sentinel.learn([MemoryWord(n=4, failures=3), MemoryWord(n=5, failures=1)])
    assert stage.sentinel.parts == 1
    stage.sentinel.learn([MemoryWord(n=5, failures=2), stage.sentinel.word()])
    assert stage.sentinel.parts == 2 and stage.sentinel.word() == MemoryWord(5, 2, 1)


def test_a_failure_is_reported_once_it_is_over_and_by_its_rank() -> None:
    stage, other = Stage(), Stage()
    stage.fail(2)
    other.sentinel.learn([stage.sentinel.word()])
    assert len(stage.run(torch.ones(4))) == len(other.run(torch.ones(4))) == 2
    (one,) = stage.emitted
    assert isinstance(one, events.Warned) and (one.check, one.severity) == ("oom", "warn")
    assert "step 1: out of memory in 1 part: OutOfMemoryError: CUDA out of memory" in one.detail
    assert one.detail.endswith("then it ran in 2 parts, on all ranks")
    assert not other.emitted and len(stage.run(torch.ones(4))) == 1


def test_steps_that_need_parts_again_and_again_keep_them() -> None:
    stage, joiner = Stage(), Stage()
    for _ in range(LASTING):
        stage.fail(2)
        stage.run(torch.ones(4))
    assert len(stage.run(torch.ones(4))) == 2, "without a failure"
    joiner.sentinel.learn([stage.sentinel.word(), MemoryWord()])
    assert joiner.sentinel.parts == 2


def test_frames_of_a_failed_attempt_hold_nothing() -> None:
    import weakref

    stage, kept = Stage(), []

    def attempt() -> None:
        big = nn.Linear(3, 3)
        kept.append(weakref.ref(big))
        raise torch.OutOfMemoryError("here")

    try:
        attempt()
    except torch.OutOfMemoryError as error:
        stage.sentinel.failed(error)
        assert kept[0]() is None


def test_rows() -> None:
    assert common_size([torch.ones(3, 2), [torch.ones(3)]]) == 3
    assert common_size([torch.ones(3), torch.ones(2)]) == common_size(["a", 1]) == 0
    pair = cut_rows((torch.arange(4), [1, 2]), 1, 3, 4)
    assert pair[0].tolist() == [1, 2] and pair[1] == [1, 2]


def test_state_is_away_where_nothing_else_has_helped() -> None:
    """Whole, with empty caches, then with the optimizer's state on the host, until the vote."""
    stage = Stage()
    weight = nn.Parameter(torch.randn(1 << 20))
    optimizer = stage.optimizers["o"] = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(1 << 20)
    optimizer.step()
    momentum = optimizer.state[weight]["momentum_buffer"]
    sentinel = stage.sentinel
    sentinel.offload = StateOffload(is_far=lambda _: True)
    for step in range(LASTING + 1):
        is_lasting = step == LASTING
        for failures in range(3):
            if failures and not is_lasting:
                stage.fail()
            sentinel.begin()
            place = momentum.data_ptr()
            sentinel.put_away()
            is_away = momentum.data_ptr() != place
            assert is_away is (failures == 2 or is_lasting), (step, failures)
            sentinel.before_vote(optimizer)
        sentinel.completed(step + 1, is_step=True)
        stage.status.n += 1
    texts = [one.detail for one in stage.emitted if isinstance(one, events.Warned)]
    assert len(texts) == LASTING
    assert "with empty caches, 4 MiB of optimizers' state on the host" in texts[0]
    notes = [one.text for one in stage.emitted if isinstance(one, events.Note)]
    assert sum("from here on it is there until the vote" in text for text in notes) == 1
