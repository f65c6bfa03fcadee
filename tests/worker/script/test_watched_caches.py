"""State that is bound late, private or cached: carried, compared or refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play

from outlast.errors import PhaseError
from outlast.worker.script import reachable_values, value_paths
from outlast.worker.script.process_modes import ENVIRONMENT, TORCH_MODES
from outlast.worker.script.value_fingerprints import identities
from outlast.worker.state.protected_state import ProtectedState


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The frames of these tests are no script's; modes of torch are put back."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))
    monkeypatch.setenv("PLAYED_SCALE", "1")
    before = TORCH_MODES.snapshot()
    yield
    for name, value in before.items():
        if TORCH_MODES[name] != value:
            TORCH_MODES[name] = value


LOOP = """
        for i in session.batches(9):
            out.append(session.run(step, i))
        """
EXACT = {
    "a private counter of a module": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self._calls = 0
            def forward(self, x):
                self._calls += 1
                return x * self._calls
        net = Net()
        session.protected.append(net)
        def step(i):
            y = net(i)
            session.step()
            return y
        """ + LOOP,
    "a private table of a module": """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self._tables = {}
            def forward(self, i):
                if i // 4 not in self._tables:
                    self._tables[i // 4] = i
                return self._tables[i // 4]
        net = Net()
        session.protected.append(net)
        def step(i):
            y = net(i)
            session.step()
            return y
        """ + LOOP,
    "a private counter of an optimizer": """
        class Own(torch.optim.SGD):
            def count(self):
                self._count = getattr(self, "_count", 0) + 1
                return self._count
        own = Own([torch.ones(1)], lr=0.1)
        own._count = 0
        session.protected.append(own)
        def step(i):
            y = own.count()
            session.step()
            return y
        """ + LOOP,
    "a cached property, late": """
        class Helper:
            now = 0
            @functools.cached_property
            def first(self):
                return self.now
        helper = Helper()
        def step(i):
            helper.now = i
            session.step()
            return i if i < 4 else 100 * i + helper.first
        """ + LOOP,
    "an attribute that a method makes late": """
        class Helper:
            def seen(self, i):
                if not hasattr(self, "first"):
                    self.first = i
                return self.first
        helper = Helper()
        def step(i):
            session.step()
            return i if i < 4 else 100 * i + helper.seen(i)
        """ + LOOP,
    "a global that a function makes late": """
        def first_of(i):
            global first
            if "first" not in globals():
                first = i
            return first
        def step(i):
            session.step()
            return i if i < 4 else 100 * i + first_of(i)
        """ + LOOP,
    "an attribute of the arguments": """
        import argparse
        args = argparse.Namespace(scale=1.0)
        def step(i):
            session.step()
            return i * args.scale
        for i in session.batches(9):
            out.append(session.run(step, i))
            if i == 4:
                args.scale = 0.5
        """,
    "a result under way that is bound late": """
        class Trainer:
            def step(self, i):
                w = torch.ones(1, requires_grad=True)
                if i % 4 == 3:
                    self.aux = w * i
                    self.aux.backward()
                session.step()
                return i
        trainer = Trainer()
        for i in session.batches(9):
            out.append(session.run(trainer.step, i))
        """,
    "a cached function of no random numbers": """
        @functools.lru_cache
        def square(i):
            return i * i
        def step(i):
            y = square(i // 3) + float(torch.rand(1))
            session.step()
            return i * square(i // 3)
        """ + LOOP,
    "the environment": """
        import os
        os.environ["PLAYED_SCALE"] = "1"
        def step(i):
            session.step()
            return i * float(os.environ["PLAYED_SCALE"])
        for i in session.batches(9):
            out.append(session.run(step, i))
            if i == 4:
                os.environ["PLAYED_SCALE"] = "0.5"
        """,
    "denormals": """
        torch.set_flush_denormal(False)
        def step(i):
            session.step()
            return float(torch.full((1,), 1e-38) * 1e-2)
        for i in session.batches(9):
            out.append(session.run(step, i))
            if i == 4:
                torch.set_flush_denormal(True)
        """,
    "an inner loop that counts": """
        def step(i):
            session.step()
            return i
        for i in session.batches(9):
            for number, each in enumerate([session.run(step, i)]):
                out.append(each + number)
        """,
}  # fmt: skip


@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    text = EXACT[way]
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    assert play(text, Session(redo=4)) == alone
    assert play(text, Session(redo=7)) == alone
    for place in (1, 4, 6, 8):
        with pytest.raises(DiedError) as died:
            play(text, Session(die=place))
        assert play(text, Session(slot=died.value.slot, begin=place)) == alone


REFUSED = {
    "a cached function that draws": """
        @functools.lru_cache
        def mask(width):
            return torch.rand(width)
        def step(i):
            y = mask(i) if i > 3 else torch.ones(1)
            session.step()
            return float(y.sum())
        """ + LOOP,
    "a cached method that draws": """
        class Masks:
            @functools.cache
            def of(self, width):
                return random.random()
        masks = Masks()
        def step(i):
            y = masks.of(i) if i > 3 else 0
            session.step()
            return y
        """ + LOOP,
    "a large table of modules that are drawn": """
        layers = {-1: nn.Linear(2, 2)}
        def layer(n):
            if n not in layers:
                layers[n] = nn.Linear(2, 2)
            return layers[n]
        def step(i):
            y = layer(i) if i > 3 else 0
            session.step()
            return i
        """ + LOOP,
    "a cached function that code between phases calls": """
        @functools.lru_cache
        def mask(width):
            return torch.rand(width)
        def step(i):
            session.step()
            return i
        for i in session.batches(9):
            out.append(session.run(step, i) + (float(mask(i).sum()) if i > 3 else 0))
        """,
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_a_cache_that_draws_when_it_is_filled_is_refused_in_the_undisturbed_run(way: str) -> None:
    session = Session()
    with pytest.raises(PhaseError, match=r"the cache .* drawn from random generators"):
        play(REFUSED[way], session)
    assert session.index in (4, 5)


def test_an_attempt_is_repeated_once_for_each_cache_and_not_for_each_entry() -> None:
    session = Session()
    play(EXACT["a cached function of no random numbers"], session)
    assert session.attempts == 9  # its rehearsals have filled and compared it
    text = """
        @functools.lru_cache
        def square(i):
            return i * i
        def step(i):
            y = square(i) if i > 3 else 0
            session.step()
            return y
        """
    session = Session()
    assert play(text + LOOP, session) == play(text + LOOP, Plain())
    assert session.attempts == 10


@pytest.mark.parametrize("fault", ["between", "within"])
@pytest.mark.parametrize("way", [way for way in REFUSED if "between phases" not in way])
@pytest.mark.parametrize("made", ["torch.rand(width)", "nn.Linear(1, 1)"])
def test_a_fault_between_two_attempts_leaves_no_cache_unjudged(
    way: str, made: str, fault: Literal["between", "within"]
) -> None:
    text = REFUSED[way].replace("torch.rand(width)", made).replace("y.sum()", "i")
    session = Session(fault=fault)
    with pytest.raises(PhaseError, match=r"the cache .* drawn from random generators"):
        play(text, session)
    assert session.index == 4
    text = EXACT["a cached function of no random numbers"]
    assert play(text, Session(fault=fault)) == play(text, Plain())


def test_protected_containers_are_no_caches() -> None:
    text = """
        history = [nn.Linear(1, 1)]  # no value that could be written down
        session.protected.append(history)
        def step(i):
            if i > 3:
                history.append(i)
            session.step()
            return i
        """
    session = Session()
    assert play(text + LOOP, session) == list(range(9))
    assert session.attempts == 9


def test_entries_of_a_refused_attempt_are_removed_from_a_cache() -> None:
    """The rank that lives on draws in its second attempt what it would draw under torchrun."""
    text = REFUSED["a cached function that draws"]
    with pytest.raises(PhaseError, match=r"the cache played.mask"):
        play(text, Session(redo=4))


def test_a_loop_without_a_loader_does_not_protect_every_none() -> None:
    protected = ProtectedState({"model": torch.nn.Linear(1, 1)}, {})
    protected.loaders.append(None)
    assert id(None) not in identities(protected)


@pytest.mark.parametrize("name", TORCH_MODES.snapshot())
def test_a_mode_is_set_to_what_was_read(name: str) -> None:
    before = TORCH_MODES[name]
    TORCH_MODES[name] = before
    assert TORCH_MODES[name] == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flushing of denormals", True),
        ("matmul precision", "medium"),
        ("backends.mkldnn.matmul.fp32_precision", "bf16"),
        ("backends.cudnn.benchmark", True),
        ("backends.mkldnn.enabled", False),
        ("backends.cuda.flash_sdp", False),
        ("autocast on cpu", True),
        ("type of autocast on cpu", "float16"),
    ],
)
def test_a_mode_changes_and_is_put_back(name: str, value: object) -> None:
    before = TORCH_MODES[name]
    assert before != value
    TORCH_MODES[name] = value
    assert TORCH_MODES[name] == value
    TORCH_MODES[name] = before
    assert TORCH_MODES[name] == before


def test_variables_of_the_environment_are_set_and_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PLAYED_OTHER", raising=False)
    assert ENVIRONMENT["PLAYED_OTHER"] is None
    ENVIRONMENT["PLAYED_OTHER"] = "x"
    assert os.environ["PLAYED_OTHER"] == ENVIRONMENT.snapshot()["PLAYED_OTHER"] == "x"
    ENVIRONMENT["PLAYED_OTHER"] = None
    assert "PLAYED_OTHER" not in os.environ
