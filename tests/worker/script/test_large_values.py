"""Values too large to carry: refused where a phase or the loop changes them, else left alone."""

from __future__ import annotations

import pytest
from tests.worker.script.simulated_phases import LOOP, Session, play, refusal

from outlast.worker.script import reachable_values, value_paths


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


def test_large_values_that_nobody_changes_are_left_alone() -> None:
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
