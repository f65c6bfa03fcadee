"""Values too large to carry: refused where a phase or the loop changes them, however late; else
left alone."""

from __future__ import annotations

import re

import pytest
from tests.worker.script.simulated_phases import LOOP, DiedError, Plain, Session, play, refusal

from outlast.errors import PhaseError
from outlast.worker.script import reachable_values, value_caches, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


REFUSED = {
    "a long list in place": ("history (list)", """
        history = [0.0] * 30_000
        def step(i):
            history[i % 7] += 1.0
            session.step()
        """),
    "a long list of lists": ("rows (list)", """
        rows = [[0.0] for _ in range(20_000)]
        def step(i):
            rows[3][0] += 1.0
            session.step()
        """),
    "a large array in place": ("memory (ndarray)", """
        import numpy
        memory = numpy.zeros((1000, 200))
        def step(i):
            memory[i] = i + 1
            session.step()
        """),
    "many objects": ("samples (list)", """
        class Sample:
            def __init__(self):
                self.loss = 0.0
        samples = [Sample() for _ in range(400)]
        def step(i):
            samples[300].loss += 1.0
            session.step()
        """),
    "a large table between phases": ("table (dict)", """
        table = {n: 0 for n in range(30_000)}
        def step(i):
            session.step()
        for i in session.batches(7):
            session.run(step, i)
            table[i] += 1
        """),
    "a long deque": ("recent (deque)", """
        from collections import deque
        recent = deque([0.0] * 30_000, maxlen=30_000)
        def step(i):
            recent.append(i + 1.0)
            session.step()
        """),
    "a full deque of tensors": ("frames (deque)", """
        from collections import deque
        frames = deque([torch.zeros(1 << 18)] * 4, maxlen=4)
        def step(i):
            frames.append(torch.ones(1 << 18) * i)
            session.step()
        """),
    "many averages": ("averages (list)", """
        averages = [torch.zeros(2048) for _ in range(400)]
        def step(i):
            for each in averages:
                each.add_(1.0)
            session.step()
        """),
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_a_large_value_that_changes_is_refused_by_name(way: str) -> None:
    name, text = REFUSED[way]
    assert name in refusal(text)


def test_unchanged_large_values_are_accepted() -> None:
    text = """
        import numpy
        class Sample:
            def __init__(self):
                self.itself, self.value = self, torch.ones(2)
        samples = [Sample() for _ in range(400)]
        numbers = [float(n) for n in range(30_000)]
        huge = [10**40] * 30_000
        names = {("a", n): {n} for n in range(30_000)}
        memory = numpy.ones((1000, 200))
        layers = [nn.Linear(2, 2) for _ in range(300)]
        parameters = [p for layer in layers for p in layer.parameters()]
        few = parameters[:2]
        def step(i):
            with torch.no_grad():
                for p in parameters:
                    p.add_(1.0)
            total = samples[i].value.sum() + numbers[i] + len(str(huge[i])) + memory[i].sum()
            total += len(names[("a", i)])
            session.step()
        """
    play(text + LOOP, Session())


LATE = {
    "a list in place": ("history (list)", """
        history = [0.0] * 50_000
        def step(i):
            if i == 6:
                history[49_000] += 1.0
            session.step()
        """),
    "a list by another name": ("rows (list)", """
        rows = [[0.0] for _ in range(20_000)]
        def touch(given):
            given[7][0] += 1.0
        def step(i):
            if i == 6:
                touch(rows)
            session.step()
        """),
    "a list that grows": ("history (list)", """
        history = [0.0] * 50_000
        def step(i):
            if i >= 6:
                history.append(float(i))
            session.step()
        """),
    "a table between phases": ("table (dict)", """
        table = {n: 0 for n in range(30_000)}
        def step(i):
            session.step()
        for i in session.batches(LAST):
            session.run(step, i)
            if i == 6:
                table[29_000] += 1
        """),
    "an array": ("memory (ndarray)", """
        import numpy
        memory = numpy.zeros((1000, 200))
        def step(i):
            if i == 6:
                memory[900] = 1.0
            session.step()
        """),
    "a transposed array of objects": ("memory (ndarray)", """
        import numpy
        memory = numpy.full((300, 200), None).T
        def step(i):
            if i == 6:
                memory[7, 250] = 1.0
            session.step()
        """),
    "a full deque": ("recent (deque)", """
        recent = collections.deque([0.0] * 30_000, maxlen=30_000)
        def step(i):
            if i == 6:
                recent.append(1.0)
            session.step()
        """),
    "one of many objects": ("samples (list)", """
        class Sample:
            def __init__(self):
                self.loss = 0.0
        samples = [Sample() for _ in range(400)]
        def step(i):
            if i == 6:
                samples[399].loss += 1.0
            session.step()
        """),
    "a tensor of an average": ("teacher.weight (Parameter)", """
        teacher = nn.Linear(2, 2)
        def step(i):
            if i == 6:
                with torch.no_grad():
                    for each in teacher.parameters():
                        each.mul_(0.5)
            session.step()
        """),
    "a large tensor": ("bank (Tensor)", """
        bank = torch.zeros(1 << 19)
        def step(i):
            if i == 6:
                bank[3] = 1.0
            session.step()
        """),
}  # fmt: skip
LAST_LOOP = """
        for i in session.batches(LAST):
            session.run(step, i)
        """


def _late(way: str, last: int) -> tuple[str, str]:
    name, text = LATE[way]
    text = text if "session.run" in text else text + LAST_LOOP
    return name, text.replace("LAST", str(last))


@pytest.mark.parametrize("way", LATE)
def test_a_first_change_after_the_first_steps_is_refused_within_one_round(way: str) -> None:
    name, text = _late(way, 400)
    assert name in refusal(text)


@pytest.mark.parametrize("way", LATE)
def test_a_late_first_change_is_refused_before_the_next_repetition(way: str) -> None:
    """The change is made in the attempt that is refused, or before it."""
    name, text = _late(way, 9)
    with pytest.raises(PhaseError, match=re.escape(name)):
        play(text, Session(redo=8 if "between" in way else 6))


def test_a_late_first_change_is_refused_before_a_checkpoint() -> None:
    name, text = _late("a list in place", 9)
    text += "    session.script.begin_phase('outlast.checkpoint', None)\n        "
    with pytest.raises(PhaseError, match=re.escape(name)):
        play(text, Session())


def test_with_warn_a_late_change_is_reported_once() -> None:
    name, text = _late("an array", 60)
    session = Session(stop=False)
    play(text, session)
    assert len([note for note in session.notes if name in note]) == 1


SMALL = """
        rows = [0.0] * 3_000
        def touch(given, i):
            given[0] += i
        def step(i):
            if i >= 6:
                touch(rows, i)
            session.step()
            return rows[0]
        for i in session.batches(12):
            out.append(session.run(step, i))
        """


def test_a_plain_value_is_carried_from_the_phase_behind_its_first_change() -> None:
    with pytest.raises(DiedError) as died:
        play(SMALL, Session(die=9))
    assert play(SMALL, Session(begin=9, slot=died.value.slot)) == play(SMALL, Plain())


def test_a_large_memo_may_grow_late_but_its_entries_may_not_change() -> None:
    text = """
        memo = {n: torch.ones(2, requires_grad=True) * n for n in range(300)}
        def lookup(i):
            if i not in memo:
                memo[i] = torch.ones(2, requires_grad=True) * i
            return memo[i]
        def step(i):
            lookup(i + (300 if i > 5 else 0))
            CHANGE
            session.step()
        for i in session.batches(40):
            session.run(step, i)
        """
    play(text.replace("CHANGE", "pass"), Session())
    assert "memo (dict)" in refusal(text.replace("CHANGE", "if i == 8: memo[7] = memo[8]"))


def test_a_value_of_many_chunks_is_looked_at_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One above the limit of one look: its end is known from the first round on."""
    monkeypatch.setattr(value_caches, "CHUNKS_MAX", 3)
    name, text = _late("an array", 90)
    text = text.replace("i == 6", "i == 60")
    assert name in refusal(text)
