"""Values that modules and objects of libraries keep outside of `__dict__`: carried or refused."""

import mmap

import pytest
import torch
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play, refusal
from torch import nn

from outlast.worker.script import reachable_values, value_paths
from outlast.worker.script.value_fingerprints import look_of


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


class Counting(nn.Module):
    """A module that counts in attributes of TorchScript."""

    calls: int
    seen: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        return x * self.calls + sum(self.seen)


def scripted() -> torch.jit.ScriptModule:
    """Return the module in TorchScript."""
    return torch.jit.script(Counting())


EXACT = {
    "a frozen teacher that the loop averages": """
        teacher = nn.Linear(2, 2).requires_grad_(False)
        torch.nn.init.ones_(teacher.weight)
        torch.nn.init.ones_(teacher.bias)
        known = teacher.weight
        def step(i):
            seen = float(teacher(torch.ones(2)).sum())
            session.step()
            return seen
        for i in session.batches(8):
            out.append(session.run(step, i))
            with torch.no_grad():
                for p in teacher.parameters():
                    p.lerp_(torch.full_like(p, i), 0.1)
            assert known is teacher.weight
        """,
    "statistics of a module that nobody protects, and a second name of them": """
        norm = nn.BatchNorm1d(2, affine=False)
        mean = norm.running_mean
        def step(i):
            norm(torch.full((2, 2), float(i)))
            seen = float(mean.sum())
            session.step()
            return seen
        for i in session.batches(8):
            out.append(session.run(step, i))
        """,
    "slots beside a dict": """
        class Meter:
            pass
        class Total(Meter):
            __slots__ = ("value",)
        total = Total()
        total.value, total.name = 0, "a"
        def step(i):
            total.value += i
            session.step()
            return total.value
        for i in session.batches(8):
            out.append(session.run(step, i))
        """,
    "a method of a list, bound to a name": """
        def made():
            push = [].append
            def step(i):
                push(i)
                session.step()
                return sum(push.__self__)
            return step
        step = made()
        for i in session.batches(8):
            out.append(session.run(step, i))
        """,
    "attributes of TorchScript": """
        from tests.worker.script.test_values_in_modules import scripted
        model = scripted()
        session.protected += [model]
        def step(i):
            value = float(model(torch.ones(1)))
            session.step()
            return value
        for i in session.batches(8):
            out.append(session.run(step, i))
        """,
}
REFUSED = {
    "digest (HASH)": "import hashlib; digest = hashlib.sha256()",
    "digest (HASHXOF)": "import hashlib; digest = hashlib.shake_128()",
    "row (c_int_Array_4)": """
import ctypes
row = (ctypes.c_int * 4)()
def change(data):
    row[0] += len(data)
""",
    "memory (mmap)": "import mmap; memory = mmap.mmap(-1, 64)",
    "scopes (ChainMap)": """
scopes = collections.ChainMap({})
def change(data):
    scopes["n"] = scopes.get("n", 0) + 1
""",
    "settings (ConfigParser)": """
import configparser
settings = configparser.ConfigParser()
settings["rate"] = {"n": "0"}
def change(data):
    settings["rate"]["n"] += "1"
""",
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    alone = play(EXACT[way], Plain())
    assert play(EXACT[way], Session(redo=5)) == alone
    with pytest.raises(DiedError) as died:
        play(EXACT[way], Session(die=5))
    assert play(EXACT[way], Session(slot=died.value.slot, begin=5)) == alone


@pytest.mark.parametrize("name", REFUSED)
def test_objects_of_libraries_that_change_are_refused_by_name(name: str) -> None:
    changes = {"digest": "digest.update", "memory": "memory.write"}
    change = changes.get(name.partition(" ")[0], "change")
    text = (
        REFUSED[name]
        + f"""
def step(i):
    {change}(b"x")
    session.step()
for i in session.batches(5):
    session.run(step, i)
"""
    )
    assert f"changes played.{name}" in refusal(text)


def test_a_closed_memory_map_has_no_state() -> None:
    memory = mmap.mmap(-1, 64)
    memory.close()
    assert look_of(memory, ())[:2] == ("object", "mmap")


LATE = {
    "a plain value that a dict of other values gets": """
        context = {"act": lambda: 0, "n": 0}
        def change(i):
            context["best"] = context.get("best", 9) - 1
        def value():
            return context.get("best")
        """,
    "a plain value that a dict of the script's class gets": """
        class Counts(dict):
            def __missing__(self, key):
                return 0
        counts = Counts()
        def change(i):
            counts["late"] += i
        def value():
            return counts["late"]
        """,
    "an attribute that the loop binds on an object": """
        class State:
            pass
        state = State()
        def change(i):
            state.best = i
        def value():
            return getattr(state, "best", None)
        """,
    "an attribute that the loop binds on a namespace": """
        import types
        state = types.SimpleNamespace()
        def change(i):
            state.best = i
        def value():
            return getattr(state, "best", None)
        """,
    "an attribute that the loop binds on a protected module": """
        net = nn.Linear(1, 1)
        session.protected += [net]
        def change(i):
            net.best = i
        def value():
            return getattr(net, "best", None)
        """,
    "an attribute that the loop binds on a function": """
        def rate():
            return 1
        def change(i):
            rate.best = i
        def value():
            return getattr(rate, "best", None)
        """,
    "an attribute with a default in the class": """
        class State:
            best = 0
        state = State()
        def change(i):
            state.best = i
        def value():
            return state.best
        """,
    "an attribute behind a property's setter": """
        class Rate:
            def __init__(self):
                self._value = 1
            @property
            def value(self):
                return self._value
            @value.setter
            def value(self, new):
                self._value = new
        rate = Rate()
        def change(i):
            rate.value *= 2
        def value():
            return rate.value
        """,
}
LOOP = """
        def step(i):
            seen = value()
            session.step()
            return seen
        for i in session.batches(9):
            out.append(session.run(step, i))
            if i > 4:
                change(i)
"""


@pytest.mark.parametrize("way", LATE)
def test_values_that_appear_or_change_late_are_carried(way: str) -> None:
    alone = play(LATE[way] + LOOP, Plain())
    assert play(LATE[way] + LOOP, Session(redo=7)) == alone
    with pytest.raises(DiedError) as died:
        play(LATE[way] + LOOP, Session(die=7))
    assert play(LATE[way] + LOOP, Session(slot=died.value.slot, begin=7)) == alone


@pytest.mark.parametrize("head", ["if True:", "def main():"])
def test_names_that_the_loop_binds_late_are_carried(head: str) -> None:
    text = f"""
        def step(i):
            session.step()
            return i
        {head}
            for i in session.batches(9):
                value = session.run(step, i)
                if i > 5:
                    out.append(kept)
                if i > 4:
                    kept = value
        {"main()" if "main" in head else ""}
        """
    alone = play(text, Plain())
    assert play(text, Session(redo=7)) == alone == [5, 6, 7]
    with pytest.raises(DiedError) as died:
        play(text, Session(die=7))
    assert play(text, Session(slot=died.value.slot, begin=7)) == alone


def test_a_list_of_the_scripts_class_that_grows_late_is_refused_by_name() -> None:
    text = """
        class Stack(list):
            pass
        stack = Stack()
        def change(i):
            stack.append(i)
        def value():
            return len(stack)
        """
    assert "adds played.stack[0] (int)" in refusal(text + LOOP)
