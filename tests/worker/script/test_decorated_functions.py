"""Variables of decorators around functions of phases: counts, averages, lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play

from outlast.worker.script import reachable_values, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


WARM = """
import functools
def warm(fn):
    calls = 0
    @functools.wraps(fn)
    def inner(*args):
        nonlocal calls
        calls += 1
        return fn(*args, 2.0 if calls > 5 else 1.0)
    return inner
"""
LOOP = """
for i in session.batches(9):
    out.append(session.run(step, i))
"""
SCRIPTS = {
    "a function": """
@warm
def step(i, scale):
    session.step()
    return i * scale
""",
    "a function, by two of one kind": """
@warm
@warm
def step(i, one, two):
    session.step()
    return i * one + two
""",
    "a function that counts by the same name": """
def outer():
    calls = 10
    @warm
    def step(i, scale):
        nonlocal calls
        calls += i
        session.step()
        return calls * scale
    return step
step = outer()
""",
    "a method": """
class Trainer:
    @warm
    def step(self, i, scale):
        session.step()
        return i * scale
step = Trainer().step
""",
    "a method, by two": """
class Trainer:
    @warm
    @warm
    def step(self, i, one, two):
        session.step()
        return i * one + two
step = Trainer().step
""",
    "a partial of a method": """
class Trainer:
    @warm
    def step(self, more, i, scale):
        session.step()
        return i * scale + more
step = functools.partial(Trainer().step, 3)
""",
    "a library's decorator around": """
@torch.enable_grad()
@warm
def step(i, scale):
    session.step()
    return i * scale
""",
    "an attribute of the wrapper": """
def counted(fn):
    @functools.wraps(fn)
    def inner(*args):
        inner.calls += 1
        return fn(*args, inner.calls)
    inner.calls = 0
    return inner
@counted
def step(i, scale):
    session.step()
    return i * scale
""",
    "an object as decorator": """
class Counted:
    def __init__(self, fn):
        functools.update_wrapper(self, fn)
        self.fn, self.calls = fn, 0
    def __call__(self, *args):
        self.calls += 1
        return self.fn(*args, self.calls)
@Counted
def step(i, scale):
    session.step()
    return i * scale
""",
}


@pytest.mark.parametrize("way", SCRIPTS)
def test_decorators_keep_their_variables(way: str) -> None:
    text = WARM + SCRIPTS[way] + LOOP
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    assert play(text, Session(redo=3)) == alone
    for place in (2, 4, 7):
        with pytest.raises(DiedError) as died:
            play(text, Session(die=place))
        assert play(text, Session(slot=died.value.slot, begin=place)) == alone
