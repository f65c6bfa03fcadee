"""Scripts under plain `python`: the contract of phases and its errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.forked_scripts import Left, rear

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


SCRIPTS = {
    "parameters": """
        session.protect(model=model, optimizer=optimizer)
        def step(batch):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            with torch.no_grad():
                model.module[0].weight.clamp_(-1, 1)
        for batch in session.batches(None, until=2):
            session.run(step, batch)
            nn.init.zeros_(model.module[0].bias)
        print(session.step_index)
        """,
    "lists of batches": """
        session.protect(model=model, optimizer=optimizer)
        def step(batches):
            optimizer.zero_grad()
            for batch in batches:
                loss_of(batch).backward()
            optimizer.step()
        for epoch in session.epochs(2):
            loop = session.enumerate(range(5), batches_per_step=2)
            assert len(loop) == 3 and len(session.batches(range(5))) == 5
            for number, batches in loop:
                session.run(step, batches)
                print(epoch, number, batches, session.step_index)
        """,
    "skipped batches": """
        session.protect(model=model, optimizer=optimizer)
        def step(batch):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
        def all_of(loop):
            yield from loop
        draws = session.batches(range(8), epochs=1)
        session.run(step, next(draws))
        session.run(step, next(draws))
        for batch in all_of(draws):
            if batch % 3 == 0:
                session.run(step, batch)
        print(session.step_index)
        """,
    "calls": """
        session.protect(model=model, optimizer=optimizer)
        def step(batch):
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
        for batch in session.batches([1], until=1):
            session.run(step, batch)
        print(*(call.name for call in session._worker.calls._calls.values()))
        """,
    "phases": """
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
        """,
    "epochs": """
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
        """,
    "scaler": """
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        session.protect(model=model, optimizer=optimizer, scaler=scaler)
        session.run(lambda: scaler.scale(loss_of(1)).backward())
        """,
}

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
    "a parameter changed by hand": (
        "def f():\n  with torch.no_grad(): model.module[0].weight.mul_(0.9)\nsession.run(f)",
        "PhaseError: f:",
    ),
    "a parameter changed before the step": (
        "def f():\n  nn.init.zeros_(model.module[0].bias)\n  loss_of(1).backward()\n"
        "  optimizer.step()\nsession.run(f)",
        "changed model.module.0.bias before the vote",
    ),
    "a phase inside a phase": (
        "session.run(lambda: session.run(lambda: None))",
        "session.run inside session.run",
    ),
    "a communication hook that keeps a state": (
        "def hook(state, bucket):\n  f = torch.futures.Future(); f.set_result(bucket.buffer())\n"
        "  return f\nmodel.register_comm_hook(dict(), hook)\nsession.run(lambda: None)",
        "communication hook hook keeps a state (dict) that is not protected",
    ),
    "a model changed after protect": (
        "model.module[0] = nn.Linear(4, 8)\nsession.run(lambda: None)",
        "ProtectError: a protected module has other parameters",
    ),
    "protect twice": ("session.protect(model=model)", "protect() was called"),
    "init twice": ("outlast.init()", "init() was called twice"),
    "a second loop": (
        "list(session.batches(None, until=0)); list(session.batches(None, until=0))",
        "called twice",
    ),
    "epochs inside epochs": (
        "for _ in session.epochs(2):\n  list(session.batches([1], epochs=1))",
        "each iteration is one epoch",
    ),
    "epochs of an iterator": ("session.epochs(iter([1]))", "takes a number or a range"),
    "two loops in an epoch": (
        "for _ in session.epochs(2):\n  list(session.batches([1])); list(session.batches([1]))",
        "called twice in one epoch",
    ),
    "a loop behind the epochs": (
        "for _ in session.epochs(0): pass\nlist(session.epochs(1))",
        "session.epochs() twice",
    ),
    "a batch of an earlier epoch": (
        "kept = []\nfor _ in session.epochs(2):\n"
        "  kept.append(iter(session.batches([1, 2]))); next(kept[-1])\n"
        "  session.run(lambda: None)\n  next(kept[0])\n",
        "was drawn after that epoch's end",
    ),
    "two batches for a step": (
        "draws = session.batches([1, 2, 3], epochs=2)\nfirst = next(draws)\nsecond = next(draws)",
        "a second batch of session.batches is drawn by next()",
    ),
    "a list of batches for a step": (
        "draws = session.batches([1, 2, 3], epochs=2)\n"
        "def pairs():\n  while True: yield [next(draws) for _ in range(2)]\n"
        "for pair in pairs(): session.run(lambda: None)",
        "a second batch of session.batches is drawn by next()",
    ),
    "the length of steps": ("len(session.batches([1], until=2))", "has no number of batches"),
    "the length of a stream": ("len(session.batches(iter([1]), epochs=1))", "has no len()"),
    "lists of no loader": (
        "session.batches(None, until=1, batches_per_step=2)",
        "session.batches(None, batches_per_step=2) has no lists of batches",
    ),
    "lists of no batches": ("session.batches([1], batches_per_step=0)", "a number from 1 on"),
    "no end": ("list(session.batches(None))", "needs until=STEPS or epochs=EPOCHS"),
    "no loader and no end": ("list(session.batches(None, epochs=1))", "it needs until=STEPS"),
    "state replaced": ("session.state = {}", "UsageError: session.state = dict(...) would replace"),
    "a report that is no number": ("session.report(loss='low')", "takes a number"),
}


PROTECTED = "session.protect(model=model, optimizer=optimizer)\n"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Left]:
    """What each script left."""
    folder = tmp_path_factory.mktemp("alone")
    scripts = SCRIPTS | {name: PROTECTED + body for name, (body, _) in ERRORS.items()}
    for number, body in enumerate(scripts.values()):
        (folder / f"{number}.py").write_text(HEAD + textwrap.dedent(body))
    batches = [[[str(folder / f"{number}.py")]] for number in range(len(scripts))]
    left = rear(folder, batches, "-W", "error")
    return dict(zip(scripts, (one for (one,) in left), strict=True))


def test_a_for_statement_may_skip_batches(left: dict[str, Left]) -> None:
    code, out, err = left["skipped batches"]
    assert (out.split(), code) == (["4"], 0), err


def test_lists_of_batches_are_steps(left: dict[str, Left]) -> None:
    lines = left["lists of batches"][1].splitlines()
    lists = ["0 [0, 1]", "1 [2, 3]", "2 [4]"]
    assert lines == [
        f"{epoch} {each} {epoch * 3 + number + 1}"
        for epoch in range(2)
        for number, each in enumerate(lists)
    ]


def test_phases_steps_and_results(left: dict[str, Left]) -> None:
    code, out, err = left["phases"]
    assert (out.split(), code) == (["0", "1", "6"], 0), err


def test_parameters_may_change_behind_the_step_and_between_phases(left: dict[str, Left]) -> None:
    assert left["parameters"].out.strip() == "2", left["parameters"].err


def test_calls_of_steps_are_described_by_variables_of_the_script(left: dict[str, Left]) -> None:
    assert left["calls"].out.strip() == "step", left["calls"].err


def test_a_loop_over_epochs_and_an_iterator_that_cannot_rewind(left: dict[str, Left]) -> None:
    _, out, err = left["epochs"]
    assert out.strip() == "[0, 1, 2, 0, 1, 2]", err


@pytest.mark.parametrize("what", ERRORS)
def test_a_broken_contract_is_a_typed_error(left: dict[str, Left], what: str) -> None:
    code, _, err = left[what]
    assert code == 1
    assert ERRORS[what][1] in err.splitlines()[-1], err


def test_gradients_with_an_unused_scaler_are_reported_as_left(left: dict[str, Left]) -> None:
    err = left["scaler"].err
    assert "no protected optimizer stepped" in err.splitlines()[-1], err


def test_an_old_torch_is_refused(tmp_path: Path) -> None:
    told = tmp_path / "torch-2.5.1.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport outlast; outlast.init()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "ConfigError: torch 2.5.1 is installed" in done.stderr.splitlines()[-1], done.stderr


def test_a_group_that_the_script_has_made_before_init_is_refused(tmp_path: Path) -> None:
    code = (
        "import outlast; from torch import distributed as dist\n"
        f"store = dist.FileStore({str(tmp_path / 'store')!r}, 1)\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "outlast.init()"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "UsageError: a process group exists already" in done.stderr.splitlines()[-1]
