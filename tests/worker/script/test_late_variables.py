"""Script variables that change late or are found by name: carried or refused."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play

from outlast.data.loader_state import LoaderState
from outlast.errors import PhaseError, ProtectError
from outlast.worker.script import reachable_values, value_paths
from outlast.worker.script.value_encoding import refill
from outlast.worker.state.protected_modules import ProtectedModules
from outlast.worker.state.protected_state import ProtectedState


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The frames of these tests are no script's; modes of torch are put back."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


LOOP = """
        for i in session.batches(9):
            out.append(session.run(step, i))
            if i == 5:
                {late}
"""
EXACT = {
    "a class with slots": """
        import dataclasses
        @dataclasses.dataclass(slots=True)
        class Meter:
            mean: float = 0.0
            n: int = 0
            def add(self, value):
                self.n += 1
                self.mean += (value - self.mean) / self.n
        meter = Meter()
        def step(i):
            session.step()
            return i * (1 + meter.mean)
        for i in session.batches(9):
            meter.add(session.run(step, i))
            out.append(meter.mean)
        """,
    "private slots of a base class": """
        class Base:
            __slots__ = ("__n",)
            def __init__(self):
                self.__n = 0
            def add(self):
                self.__n += 1
                return self.__n
        class Meter(Base):
            __slots__ = "last"
        meter = Meter()
        def step(i):
            session.step()
            return i
        for i in session.batches(9):
            session.run(step, i)
            out.append(meter.add())
        """,
    "another function": """
        def warm(x):
            return x
        def main(x):
            return 3 * x
        rule = warm
        def step(i):
            session.step()
            return rule(i)
        """ + LOOP.format(late="rule = main"),
    "a static method": """
        class Rules:
            @staticmethod
            def warm(x):
                return x
            @staticmethod
            def main(x):
                return 3 * x
        rule = Rules.warm
        def step(i):
            session.step()
            return rule(i)
        """ + LOOP.format(late="rule = Rules.main"),
    "a function of the library": """
        rule = torch.nn.functional.relu
        def step(i):
            session.step()
            return float(rule(torch.tensor(i - 4.0)))
        """ + LOOP.format(late="rule = torch.tanh"),
    "a partial": """
        def scaled(x, by=1):
            return x * by
        rule = functools.partial(scaled, by=2)
        def step(i):
            session.step()
            return rule(i)
        """ + LOOP.format(late="rule = functools.partial(scaled, by=5)"),
    "a function that is none any more": """
        def double(x):
            return 2 * x
        hook = double
        def step(i):
            session.step()
            return hook(i) if hook else i
        """ + LOOP.format(late="hook = None"),
    "None that becomes a function": """
        def double(x):
            return 2 * x
        hook = None
        def step(i):
            session.step()
            return hook(i) if hook else i
        """ + LOOP.format(late="hook = double"),
    "a member of an enumeration": """
        import enum
        class Stage(enum.Enum):
            WARM = 1
            MAIN = 2
        stage = Stage.WARM
        def step(i):
            session.step()
            return i * (3 if stage is Stage.MAIN else 1)
        """ + LOOP.format(late="stage = Stage.MAIN"),
    "a frozen configuration": """
        import dataclasses
        def double(x):
            return 2 * x
        @dataclasses.dataclass(frozen=True)
        class Config:
            scale: float = 1.0
            rule: object = double
            def of(self, x):
                return self.rule(x) * self.scale
        config = Config()
        def step(i):
            session.step()
            return config.of(i)
        """ + LOOP.format(late="config = dataclasses.replace(config, scale=0.5)"),
    "a named tuple": """
        Config = collections.namedtuple("Config", ["scale", "names"])
        config = Config(1.0, ("a",))
        def step(i):
            session.step()
            return i * config.scale, config.names
        """ + LOOP.format(late='config = config._replace(scale=0.5, names=("b",))'),
    "another object of the same class": """
        class Config:
            def __init__(self, scale):
                self.scale = scale
        config = Config(1.0)
        def step(i):
            session.step()
            return i * config.scale
        """ + LOOP.format(late="config = Config(0.5)"),
    "a context variable": """
        import contextvars
        heat = contextvars.ContextVar("heat", default=4.0)
        heat.set(4.0)
        def step(i):
            session.step()
            return i / heat.get()
        for i in session.batches(9):
            out.append(session.run(step, i))
            heat.set(heat.get() * 0.9)
        """,
    "a context variable, late": """
        import contextvars
        heat = contextvars.ContextVar("heat", default=4.0)
        heat.set(4.0)
        def step(i):
            session.step()
            return i / heat.get()
        """ + LOOP.format(late="heat.set(2.0)"),
    "a setting of a library's module": """
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3))
        session.protected.append(model)
        def anneal(by):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = module.p * by
        def step(i):
            session.step()
            return i * model[1].p
        """ + LOOP.format(late="anneal(0.5)"),
    "the default dtype": """
        torch.set_default_dtype(torch.float32)
        def step(i):
            session.step()
            return str(torch.tensor(1.0 * i).dtype)
        """ + LOOP.format(late="torch.set_default_dtype(torch.float64)"),
}  # fmt: skip


@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    text = EXACT[way]
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    assert play(text, Session(redo=2)) == alone
    assert play(text, Session(redo=7)) == alone
    for place in (1, 4, 6, 8):
        with pytest.raises(DiedError) as died:
            play(text, Session(die=place))
        assert play(text, Session(slot=died.value.slot, begin=place)) == alone


REFUSED = {
    "another module": ("rule to another MSELoss", """
        rule = nn.MSELoss()
        def step(i):
            session.step()
            return float(rule(torch.ones(2), torch.zeros(2)))
        """ + LOOP.format(late='rule = nn.MSELoss(reduction="sum")')),
    "a lambda": ("rule", """
        def warm(x):
            return x
        rule = warm
        def step(i):
            session.step()
            return rule(i)
        """ + LOOP.format(late="rule = lambda x: 3 * x")),
    "a lambda from the start": ("rule to another function", """
        rule = lambda x: x
        def step(i):
            session.step()
            return rule(i)
        """ + LOOP.format(late="rule = lambda x: 3 * x")),
    "an object that holds others": ("config to another Config", """
        class Config:
            def __init__(self, scale):
                self.loss = nn.MSELoss(reduction=scale)
        config = Config("mean")
        def step(i):
            session.step()
            return float(config.loss(torch.ones(2), torch.zeros(2)))
        """ + LOOP.format(late='config = Config("sum")')),
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_late_changes_of_uncarriable_values_are_refused(way: str) -> None:
    name, text = REFUSED[way]
    with pytest.raises(PhaseError, match=name):
        play(text, Session())


def test_objects_created_anew_each_epoch_are_accepted() -> None:
    text = """
        class Meter:
            def __init__(self):
                self.total = 0.0
            def add(self, value):
                self.total += value
        def step(i):
            session.step()
            return float(i)
        meter = Meter()
        for i in session.batches(9):
            if i % 4 == 0:
                meter = Meter()
            meter.add(session.run(step, i))
            out.append(meter.total)
        """
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    with pytest.raises(DiedError) as died:
        play(text, Session(die=6))
    assert play(text, Session(slot=died.value.slot, begin=6)) == alone


@pytest.mark.parametrize(
    "place",
    [
        ["os", "system"],
        ["torch", "load"],
        ["torch.hub", "load"],
        ["builtins", "eval"],
        ["torch.nn.functional", "torch.load"],
        ["torch.nn.functional", "importlib.import_module"],
        ["its_script", "os.system"],
        ["its_script", "Popen"],
        ["its_script", "Own.__init__.__globals__"],
    ],
)
def test_a_saved_name_leads_to_no_function_of_a_library(
    place: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = types.ModuleType("its_script")
    script.__file__ = "<script>"
    exec("import os\nfrom subprocess import Popen\nclass Own: pass", vars(script))
    monkeypatch.setitem(sys.modules, "its_script", script)
    assert refill(None, {"outlast.named": ["its_script", "Own"]}, in_place=False)[0] is script.Own
    with pytest.raises(value_paths.PathGone):
        refill(None, {"outlast.named": place}, in_place=False)
    with pytest.raises(value_paths.PathGone):
        refill(None, {"outlast.partial": [{"outlast.named": place}, [], {}]}, in_place=False)


def test_a_hook_of_code_between_phases_is_found() -> None:
    linear = torch.nn.Linear(2, 2)
    modules = ProtectedModules({"model": torch.nn.Sequential(linear, torch.nn.ReLU())})
    linear.register_forward_hook(lambda *_: None)
    assert modules.new_hook() == ""  # before the first phase
    modules.remember_hooks()
    handle = linear.register_forward_pre_hook(lambda *_: None)
    assert modules.new_hook() == "model.0 (Linear)"
    handle.remove()
    assert modules.new_hook() == ""
    torch.ones(2, requires_grad=True).register_hook(lambda _: None)
    assert modules.new_hook() == ""
    linear.weight.register_post_accumulate_grad_hook(lambda _: None)
    assert modules.new_hook() == "model.0 (Linear)"
    modules.remember_hooks()
    assert modules.new_hook() == ""


def another_layer(model: torch.nn.Sequential) -> None:
    model[1] = torch.nn.GELU()


def another_forward(model: torch.nn.Sequential) -> None:
    model[1].forward = torch.tanh


def swapped_layers(model: torch.nn.Sequential) -> None:
    model[1], model[2] = model[2], model[1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (another_layer, "model.1 (ReLU) was replaced by a GELU"),
        (another_forward, "model.1 (ReLU) was given another forward"),
        (swapped_layers, "model.1 (ReLU) was replaced by a Tanh"),
    ],
)
def test_layers_that_the_loop_changes_are_named(
    change: Callable[[torch.nn.Sequential], None], text: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Tanh())
    protected = ProtectedState({"model": model}, {})
    protected.check_unchanged()
    change(model)
    with pytest.raises(ProtectError, match="other layers than in the first phase") as raised:
        protected.check_unchanged()
    assert text in str(raised.value)


def test_a_generator_that_the_loop_has_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that died had it at the top of its script; the one that takes over has not yet."""
    script = types.ModuleType("late_script")
    script.__file__ = "/somewhere/late_script.py"
    monkeypatch.setitem(sys.modules, "late_script", script)
    lost, successor = LoaderState({}), LoaderState({})
    script.noise = torch.Generator().manual_seed(8)
    torch.rand(3, generator=script.noise)
    saved, expected = lost.changes(), torch.rand(1, generator=script.noise.clone_state())
    del script.noise
    successor.put(saved)
    assert torch.equal(torch.rand(1, generator=script.noise), expected)


def test_modes_are_read_beside_the_newer_settings_of_precisions() -> None:
    """torch refuses the older function once the newer settings were used."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from outlast.worker.script.process_modes import TORCH_MODES\n"
        "before = TORCH_MODES.snapshot()\n"
        "for name, mode in before.items(): TORCH_MODES[name] = mode\n"
        "assert TORCH_MODES.snapshot() == before and before['matmul precision'] is None"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
