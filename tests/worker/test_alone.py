"""A script under plain `python`: the contract of a phase holds there too, and so do its errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.process

HEAD = """
import torch, outlast
from torch import nn
session = outlast.init()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def loss_of(batch):
    return model(torch.full((2, 4), 1.0 + batch)).pow(2).mean()
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    code = HEAD + textwrap.dedent(body)
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_phases_steps_and_results() -> None:
    done = run(
        """
        other = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        session.protect(model=model, optimizer=optimizer, other=other, scaler=scaler)
        asked = []
        optimizer.register_step_pre_hook(lambda *_: asked.append(session.step_index))
        def step(batch):
            optimizer.zero_grad()
            scaler.scale(loss_of(batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            other.step()
            return {"batch": batch, "gradient": model.module[0].weight.grad.clone()}
        def closed(batch):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(batch)
                loss.backward()
                return loss
            return optimizer.step(closure).item()
        for batch in session.batches(None, until=6):
            before = session.step_index
            result = session.run(step if batch < 3 else closed, batch)
            assert session.step_index == before + 1
            session.report(loss=float(batch))
        assert asked == [0, 1, 2, 3, 4, 5], asked
        assert session.shared("id", lambda: 7) == 7
        print(session.rank, session.world_size, session.step_index)
        """
    )
    assert (done.stdout.split(), done.returncode) == (["0", "1", "6"], 0), done.stderr


def test_a_loop_over_epochs_and_an_iterator_that_cannot_rewind() -> None:
    done = run(
        """
        def numbers():
            yield from range(3)
        session.protect(model=model, optimizer=optimizer)
        seen = []
        def step(batch):
            seen.append(batch)
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
        class Again:
            def __iter__(self):
                return numbers()
        for batch in session.batches(Again(), epochs=2):
            session.run(step, batch)
        print(seen)
        """
    )
    assert done.stdout.strip() == "[0, 1, 2, 0, 1, 2]", done.stderr


ERRORS = {
    "a step outside a phase": (
        "session.run(lambda: None)\nmodel.module[0].bias.grad = torch.ones(8)\noptimizer.step()",
        "PhaseError: SGD.step() outside session.run()",
    ),
    "a collective outside a phase": (
        "session.run(lambda: None)\ntorch.distributed.all_reduce(torch.ones(1))",
        "PhaseError",
    ),
    "a collective after the step": (
        "def f():\n  loss_of(1).backward(); optimizer.step()\n"
        "  torch.distributed.all_reduce(torch.ones(1))\nsession.run(f)",
        "PhaseError",
    ),
    "random numbers after the step": (
        "def f():\n  loss_of(1).backward(); optimizer.step(); torch.rand(1)\nsession.run(f)",
        "PhaseError: f",
    ),
    "gradients left": (
        "session.run(lambda: loss_of(1).backward())",
        "no protected optimizer stepped",
    ),
    "a phase inside a phase": (
        "session.run(lambda: session.run(lambda: None))",
        "session.run inside session.run",
    ),
    "protect twice": ("session.protect(model=model)", "protect() was called"),
    "init twice": ("outlast.init()", "init() was called twice"),
    "a second loop": (
        "list(session.batches(None, until=0)); list(session.batches(None, until=0))",
        "called twice",
    ),
    "no end": ("list(session.batches(None))", "needs until=STEPS or epochs=EPOCHS"),
    "a report that is no number": ("session.report(loss='low')", "takes a number"),
}


@pytest.mark.parametrize(("body", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_a_broken_contract_is_a_typed_error(body: str, message: str) -> None:
    done = run("session.protect(model=model, optimizer=optimizer)\n" + body)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1], done.stderr
