"""A step that is taken back and redone beneath a script which has gone on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outlast.errors import MismatchError
from outlast.transport import messages
from outlast.transport.worker_page import Page
from outlast.worker.phases.phase_attempt import (
    AttemptUndone,
    Kind,
    PhaseAttempt,
    UndoCopy,
    deep_copy,
)
from outlast.worker.phases.script_progress import ScriptProgress
from outlast.worker.phases.step_redo import StepRedo
from outlast.worker.state.pipeline_stages import PipelineStages
from outlast.worker.state.protected_state import ProtectedState, Replicated
from outlast.worker.worker_status import WorkerStatus

COPY = messages.Checkpointed(n=3, step=2, path="step-000000002", tier="memory")
KEY = "train_step:1"


def _view(module: nn.Module) -> Any:
    return SimpleNamespace(state_dict=module.state_dict, load_state_dict=module.load_state_dict)


class Replaced(Exception):  # noqa: N818 - this process ends here
    """Raised where a worker waits to be killed."""


class Runner:
    """A phase runner whose attempts always win, unless the test says otherwise."""

    def __init__(self, page: Page, **more: Any) -> None:
        self.status = WorkerStatus(page, lambda _: None, lambda _: None)
        self.status.generation = self.status.opened = 1
        self.status.n, self.status.step, self.status.copy = 4, 2, COPY
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.noise = torch.Generator().manual_seed(4)
        self.state: dict[str, Any] = {"count": 0}
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.protected = ProtectedState({**named, "noise": self.noise, **more}, self.state)
        self.place = ScriptProgress()
        self.place.draw(b"batch 2")
        self.redo = StepRedo(self.status, self.place, self)
        self.redo.put_back = self._put_back
        self.save_on_request: Callable[[], None] = lambda: None
        self.refusals = 0
        self.scale = 1.0
        self.step()
        self.protected.completed(KEY)
        self._saved = deep_copy(self.protected.replicated())

    def _put_back(self, copy: messages.Checkpointed) -> None:
        assert copy == COPY
        self.protected.adopt(self._saved)

    def step(self) -> float:
        self.optimizer.zero_grad()
        draw = torch.randn(5, 3, generator=self.noise)
        loss = self.model(draw * self.scale).square().mean()
        loss.backward()
        self.state["count"] += 1
        self.optimizer.step()
        return loss.item()

    def protected_state(self) -> ProtectedState:
        return self.protected

    def run_attempt(self, call: Callable[[], Any], key: str, kind: Kind, undo: bool) -> Any:
        attempt = PhaseAttempt(kind, key, UndoCopy(self.protected, key), 0, has_copy=undo)
        self.status.enter_attempt("running", kind)
        self.redo.begin(attempt, call, COPY.path if self.status.step == COPY.step else "")
        result = call()
        if self.refusals:
            self.refusals -= 1
            self.redo.put_back(COPY)
            attempt.undo.put_back()
            self.status.closed = self.status.opened
            raise AttemptUndone
        self.place.add(b"result", b"")
        self.redo.completed()
        step = self.status.step + (kind == "step")
        self.status.completed(step=step, result=b"", shared=False)
        return result

    def await_replacement(self, error: BaseException, state: str, kind: str = "") -> Any:
        assert (state, kind) == ("broken", "unknown")
        raise Replaced(str(error))

    def reopen(self) -> None:
        self.status.generation += 1
        self.status.opened = self.status.generation

    def values(self) -> list[Any]:
        tensors = {**self.model.state_dict(), **self.protected.tensors()}
        values = [each.tolist() for _, each in sorted(tensors.items())]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [*values, rates, self.scheduler.last_epoch, self.noise.get_state().tolist(),
                dict(self.state)]  # fmt: skip


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create(1 << 14)
    yield made
    made.close()


def go_on(runner: Runner) -> None:
    """Do what the script does behind its step, and before its next phase."""
    runner.scheduler.step()
    runner.state["between"] = torch.rand(1, generator=runner.noise).item()


def test_the_script_keeps_what_it_has_done_behind_the_step(page: Page) -> None:
    runner = Runner(page)
    before = runner.values()
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    assert runner.status.is_redoable
    go_on(runner)
    after, place = runner.values(), runner.place.copy()
    runner.redo.take_back(COPY)
    assert runner.values() == before
    assert (runner.status.n, runner.status.step) == (4, 2) and not runner.place.done
    runner.reopen()
    runner.redo.run()
    assert runner.values() == after and runner.place == place
    assert (runner.status.n, runner.status.step) == (5, 3)
    assert not runner.status.is_redoable  # a step is taken back once
    with pytest.raises(MismatchError, match="phase 5 of this rank cannot be taken back"):
        runner.redo.take_back(COPY)


def test_variables_that_share_objects_still_share_them(page: Page) -> None:
    runner = Runner(page)
    rows: list[Any] = runner.state.setdefault("rows", [])
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    row, tensor = {"loss": 1.0}, torch.ones(2)
    rows.append(row)
    runner.state["kept"] = (row, tensor, np.ones(2), {1})
    kept = runner.state["kept"]
    runner.redo.take_back(COPY)
    assert runner.state == {"count": 1, "rows": []} and runner.state["rows"] is rows
    runner.reopen()
    runner.redo.run()
    row["accuracy"] = 0.5
    assert runner.state["rows"] is rows and rows == [{"loss": 1.0, "accuracy": 0.5}]
    assert runner.state["kept"] is kept and kept[1] is tensor and tensor.tolist() == [1, 1]
    assert (kept[2].tolist(), kept[3]) == ([1, 1], {1})


def test_a_redo_that_is_refused_is_done_in_the_next_generation(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    go_on(runner)
    after = runner.values()
    runner.redo.take_back(COPY)
    runner.refusals = 1
    runner.redo.run()
    assert not runner.status.is_open and runner.status.n == 4
    runner.reopen()
    runner.redo.run()
    assert runner.values() == after and runner.status.n == 5


def test_a_requested_save_comes_before_the_redo(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    runner.redo.take_back(COPY)
    steps: list[int] = []

    def save() -> None:
        runner.redo.run()  # as a phase does that recovers by itself
        steps.append(runner.status.step)
        runner.status.requested = ""

    runner.save_on_request = save
    runner.status.requested = "save"
    runner.redo.run()
    assert steps == [2] and runner.status.step == 3


def test_a_step_that_does_not_repeat_replaces_the_rank(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    runner.redo.take_back(COPY)
    runner.scale = 2.0  # as state that nobody protects
    with pytest.raises(Replaced, match=r"step 3 was taken back and redone, and model\.weight"):
        runner.redo.run()


def test_weights_that_the_script_changes_behind_the_step_replace_the_rank(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    with torch.no_grad():
        runner.model.bias.mul_(2)
    runner.redo.take_back(COPY)
    with pytest.raises(Replaced, match=r"model\.bias of this rank differ"):
        runner.redo.run()


def test_the_next_complete_phase_ends_the_offer(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    runner.run_attempt(lambda: 1, "evaluate:1", "eval", undo=False)
    assert not runner.status.is_redoable
    with pytest.raises(MismatchError, match="no step is kept"):
        runner.redo.take_back(COPY)


def test_the_scripts_end_ends_the_offer(page: Page) -> None:
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    assert not runner.redo.end_offer() and not runner.status.is_redoable
    runner = Runner(page)
    runner.run_attempt(runner.step, KEY, "step", undo=False)
    runner.status.close(messages.Close(generation=1, reason=""))
    assert runner.redo.end_offer()


class Momentum(torch.optim.SGD):
    """An optimizer that counts in plain numbers."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
        return super().step(closure)


def test_what_a_copy_does_not_restore_is_not_offered(page: Page) -> None:
    assert _offers(Runner(page))
    assert not _offers(Runner(page), kind="eval")
    assert not _offers(Runner(page), copied="")
    assert not _offers(Runner(page), copied="step-000000001")
    assert not _offers(Runner(page), key="other_step:9")  # its first phase
    assert not _offers(Runner(page), has_copy=True)
    assert not _offers(Runner(page, average=Replicated(_view(nn.Linear(3, 2)))))
    extra = nn.Linear(2, 2)
    runner = Runner(page, extra=extra, counting=Momentum(extra.parameters(), lr=0.1))
    assert _offers(runner)
    extra(torch.ones(1, 2)).sum().backward()
    runner.protected.optimizers["counting"].step()
    assert not _offers(runner)


def test_a_step_of_a_pipeline_is_not_offered(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(page)
    monkeypatch.setattr(PipelineStages, "__bool__", lambda _self: True)  # a schedule needs ranks
    assert not _offers(runner)


def _offers(
    runner: Runner, *, kind: Kind = "step", key: str = KEY, copied: str = COPY.path,
    has_copy: bool = False,
) -> bool:  # fmt: skip
    attempt = PhaseAttempt(kind, key, UndoCopy(runner.protected, key), 0, has_copy=has_copy)
    runner.redo.begin(attempt, runner.step, copied)
    return runner.status.is_pending_redoable
