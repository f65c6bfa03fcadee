"""Class variables and names bound by the first step, in a redo and in a successor."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play
from torch import nn

from outlast.errors import PhaseError, ProtectError
from outlast.worker.script import reachable_values, value_paths
from outlast.worker.script.carried_variables import CarriedVariables
from outlast.worker.script.value_paths import PathRoots
from outlast.worker.state.protected_modules import BufferSnapshot, ModuleBuffers, ProtectedModules


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


EXACT = {
    "a default of the class": """
        class Trainer:
            count = 0
            def step(self, i):
                self.count += 1
                session.step()
                return self.count
        trainer = Trainer()
        for i in session.batches(7):
            out.append((session.run(trainer.step, i), trainer.count, Trainer.count))
        """,
    "a counter of the class": """
        class Trainer:
            made = 0
            def step(self, i):
                Trainer.made += 1
                session.step()
                return self.made
        trainer = Trainer()
        for i in session.batches(7):
            out.append((session.run(trainer.step, i), Trainer.made, "made" in vars(trainer)))
        """,
    "a list of the class, and a counter by type(self)": """
        class Base:
            seen, made = [], 0
            def step(self, i):
                type(self).made += 1
                self.seen.append(i)
                session.step()
                return self.made
        class Trainer(Base):
            pass
        trainer = Trainer()
        for i in session.batches(7):
            out.append((session.run(trainer.step, i), Trainer.made, Base.made, tuple(Base.seen)))
        """,
    "bound by the first step": """
        class Trainer:
            def step(self, i):
                if not hasattr(self, "count"):
                    self.count = 0
                self.count += 1
                session.step()
                return self.count
        trainer = Trainer()
        def step(i):
            global steps
            steps = globals().get("steps", 0) + 1
            return trainer.step(i) + steps
        for i in session.batches(7):
            out.append((session.run(step, i), trainer.count, steps))
        """,
    "bound by the first step to a class, to its base, and in a slot": """
        class Meta(type):
            pass
        class Base(metaclass=Meta):
            pass
        class Trainer(Base):
            __slots__ = ("count",)
            @classmethod
            def calls(cls):
                cls.called = getattr(cls, "called", 0) + 1
                Meta.called = getattr(Meta, "called", 0) + 1
                return cls.called + 10 * Meta.called
            def step(self, i):
                self.count = getattr(self, "count", 0) + 1
                if not hasattr(Base, "seen"):
                    Base.seen = []
                Base.seen.append(i)
                session.step()
                return self.calls_before + self.count
            @property
            def calls_before(self):
                return sum(Base.seen)
        trainer = Trainer()
        def step(i):
            called = Trainer.calls()
            return called, trainer.step(i)
        for i in session.batches(7):
            out.append((session.run(step, i), tuple(Base.seen)))
        """,
    "objects that a defaultdict makes": """
        class Meter:
            def __init__(self):
                self.sum = 0
            def update(self, value):
                self.sum += value
        meters = collections.defaultdict(Meter)
        def step(i):
            for name in ("loss", "norm"):
                meters[name].update(i)
            session.step()
            return meters["loss"].sum
        for i in session.batches(7):
            out.append((session.run(step, i), meters["norm"].sum))
        """,
    "an object that the first step makes, and nothing changes": """
        class Table:
            def __init__(self):
                self.rows, self.layer = {0: 2.0, 1: 3.0}, nn.Linear(1, 1)
                nn.init.ones_(self.layer.weight.requires_grad_(False))
        class Box:
            pass
        box = Box()
        def step(i):
            if not hasattr(box, "table"):
                box.table = Table()
            session.step()
            return box.table.rows[i % 2] * float(box.table.layer.weight)
        for i in session.batches(7):
            out.append(session.run(step, i))
        """,
}

MADE = {
    "an object": (
        "makes played.box.meter", ".meter.sum", "box.meter = Meter()", "box.meter.update(i)"
    ),
    "an object whose method is not called yet": (
        "makes played.box.meter", ".sum", "box.meter = Meter()", "i > 5 and box.meter.update(i)"
    ),
    "an object inside of another": (
        "makes played.box.meter['a'][0]", ".sum", "box.meter = {'a': [Meter()]}",
        "box.meter['a'][0].update(i)"
    ),
    "a bound method": (
        "makes played.box.meter.__self__", ".sum", "box.meter = Meter().update", "box.meter(i)"
    ),
    "a large tensor": (
        "makes played.box.meter ", ": ", "box.meter = torch.zeros(1 << 19)", "box.meter.add_(i)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_objects_that_the_first_attempt_makes_and_changes_are_refused(kind: str) -> None:
    owner, value, make, change = MADE[kind]
    text = f"""
        class Box:
            pass
        class Meter:
            def __init__(self):
                self.sum = 0
            def update(self, value):
                self.sum += value
        box = Box()
        def step(i):
            if not hasattr(box, "meter"):
                {make}
            {change}
            session.step()
        for i in session.batches(7):
            session.run(step, i)
        """
    with pytest.raises(PhaseError) as refused:
        play(text, Session())
    assert owner in str(refused.value)
    assert value in str(refused.value)
    assert "before the first phase" in str(refused.value)


@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    text = EXACT[way]
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    assert play(text, Session(redo=2)) == alone
    for place in (1, 4):
        with pytest.raises(DiedError) as died:
            play(text, Session(die=place))
        assert play(text, Session(slot=died.value.slot, begin=place)) == alone


@pytest.mark.parametrize("undone", [True, False])
def test_values_wait_for_an_object_that_the_first_attempt_makes(
    monkeypatch: pytest.MonkeyPatch, undone: bool
) -> None:
    script = types.ModuleType("a_script")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    path = (("module", script.__name__), ("name", "box"), ("attr", "table"), ("attr", "rows"))
    script.box = types.SimpleNamespace(table=types.SimpleNamespace(rows=[7]))
    before = CarriedVariables(PathRoots())
    before.add(path, in_place=True)
    saved = before.state()
    script.box = types.SimpleNamespace()
    carried = CarriedVariables(PathRoots())
    carried.restore(saved)
    carried.restore_ownerless(undone=False)  # nothing has made it yet
    script.box.table = types.SimpleNamespace(rows=[1])
    if undone:
        carried.restore_ownerless(undone=True)
        assert script.box.table.rows == [7]
        carried.restore_ownerless(undone=False)
    else:
        with pytest.raises(PhaseError, match=r"rows was \[7\] .* no place for it"):
            carried.restore_ownerless(undone=False)


def test_a_buffer_that_an_undone_attempt_registers_is_refused_if_it_changes() -> None:
    model = nn.Linear(1, 1)
    buffers = ModuleBuffers(ProtectedModules({"model": model}))
    first = BufferSnapshot(buffers, everything=True)
    model.register_buffer("mask", torch.ones(1))
    model.register_buffer("count", torch.ones(1))
    first.must_fit()
    second = BufferSnapshot(buffers, everything=True)
    second.must_fit()
    model.get_buffer("count").add_(1)
    with pytest.raises(ProtectError, match=r"model\.count, .*register it before protect"):
        second.must_fit()
    later = BufferSnapshot(buffers, everything=False)  # the function is known
    model.get_buffer("count").add_(1)
    later.must_fit()
