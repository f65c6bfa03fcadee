"""Unprotected script variables: carried exactly, or refused by name in the first steps."""

from __future__ import annotations

import pytest
from tests.worker.script.simulated_phases import LOOP, DiedError, Plain, Session, play, refusal

from outlast.errors import PhaseError
from outlast.worker.script import reachable_values, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


EXACT = {
    "prefetch in globals": """
        rng = np.random.default_rng(0)
        X = torch.from_numpy(rng.normal(size=4))
        def step(_):
            global X
            seen = float(X.sum())
            X = torch.from_numpy(rng.normal(size=4))
            session.step()
            return seen
        for i in session.batches(7):
            out.append(session.run(step, i))
        """,
    "children of a generator": """
        rng = np.random.default_rng(1)
        def step(i):
            drawn = rng.spawn(1)[0].random()
            session.step()
            return drawn
        for i in session.batches(7):
            out.append((session.run(step, i), rng.spawn(1)[0].random()))
        """,
    "best, between phases": """
        best, since = 9.0, 0
        def step(i):
            session.step()
            return (i - 3) ** 2
        for i in session.batches(8):
            loss = session.run(step, i)
            if loss < best:
                best, since = loss, 0
            else:
                since += 1
            out.append((best, since))
        """,
    "locals of main()": """
        def step(i):
            session.step()
            return (i - 3) ** 2
        def main():
            best, mean, kept = 9.0, 0.0, []
            for i in session.batches(8):
                loss = session.run(step, i)
                best = min(best, loss)
                mean = 0.9 * mean + loss
                if i % 3 == 0:
                    kept.append(loss)
                out.append((best, mean, tuple(kept)))
        main()
        """,
    "a closure's cells": """
        def made():
            x, seen = 1.0, []
            def step(i):
                nonlocal x
                x = x / 2 + i
                seen.append(x)
                session.step()
                return x, tuple(seen)
            return step
        step = made()
        for i in session.batches(7):
            out.append(session.run(step, i))
        """,
    "a trainer with attributes": """
        class Meter:
            def __init__(self):
                self.total, self.window = 0.0, collections.deque(maxlen=2)
            def update(self, value):
                self.total += value
                self.window.append(value)
        class Trainer:
            def __init__(self):
                self.count, self.meter, self.lowest = 0, Meter(), 99.0
                self.hidden = torch.zeros(2)
            def step(self, i):
                self.count += 1
                self.hidden = self.hidden * 0.5 + i
                session.step()
                return self.count + float(self.hidden.sum())
            def fit(self):
                for i in session.batches(8):
                    loss = session.run(self.step, i)
                    self.meter.update(loss)
                    self.lowest = min(self.lowest, loss)
                    out.append((self.meter.total, tuple(self.meter.window), self.lowest))
        Trainer().fit()
        """,
    "generators nobody named": """
        rng, other = np.random.default_rng(3), random.Random(4)
        torch_rng = torch.Generator().manual_seed(5)
        def step(i):
            value = rng.normal() + other.random() + float(torch.rand(1, generator=torch_rng))
            session.step()
            return value
        for i in session.batches(6):
            out.append(session.run(step, i))
        """,
    "written in place": """
        table, sums = {"n": 0}, torch.zeros(2)
        array = np.zeros(3)
        def step(i):
            table["n"] += i
            sums.add_(i)
            array[i % 3] += 1
            session.step()
            return table["n"] + float(sums.sum()) + float(array @ [1, 2, 4])
        for i in session.batches(7):
            out.append(session.run(step, i))
        """,
    "a function's default and attribute": """
        def step(i, seen=[]):
            seen.append(i)
            step.calls += 1
            session.step()
            return sum(seen) + 100 * step.calls
        step.calls = 0
        for i in session.batches(6):
            out.append(session.run(functools.partial(step), i))
        """,
    "bound anew before it is read": """
        def step(i):
            session.step()
            return torch.ones(2, requires_grad=True) * i
        started = time.time()
        for i in session.batches(5):
            loss = session.run(step, i)
            elapsed = time.time() - started
            out.append(float(loss.detach().sum()))
        """,
    "a method that a successor meets late": """
        class Trainer:
            def __init__(self):
                self.count, self.seen = 0, []
            def step(self, i):
                self.count += 1
                session.step()
                return self.count
            def evaluate(self):
                self.seen = [*self.seen, self.count]
                return self.seen
        trainer = Trainer()
        for i in session.batches(5):
            out.append(session.run(trainer.step, i))
            if i in (0, 4):
                out.append(session.run(trainer.evaluate))
        out.append([trainer.count, trainer.seen])
        """,
    "an inner function that a successor meets late": """
        def main():
            count = 0
            def step(i):
                nonlocal count
                count += 1
                session.step()
                return count
            def evaluate():
                nonlocal count
                count += 10
                return count
            for i in session.batches(5):
                out.append(session.run(step, i))
                if i in (0, 4):
                    out.append(session.run(evaluate))
            out.append(count)
        main()
        """,
    "a cache that is filled once": """
        memo, handle = {}, None
        @functools.lru_cache
        def table(n):
            return torch.arange(n, dtype=torch.float32)
        def step(i):
            global handle
            if handle is None:
                handle = object()
            memo.setdefault("big", torch.ones(1 << 19))
            session.step()
            return float(table(4).sum() + memo["big"][0]) + i
        for i in session.batches(5):
            out.append(session.run(step, i))
        """,
    "data longer than memory should hold twice": """
        data = [torch.ones(1 << 19) * i for i in range(3)]
        ids = list(range(100_000))
        def step(i):
            x = data[i % 3]
            session.step()
            return float(x[0]) + ids[i]
        for i in session.batches(5):
            out.append(session.run(step, i))
        """,
}


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


REFUSED = {
    "itertools.cycle": ("cycle", """
        cycle = itertools.cycle([1, 2])
        def step(i):
            value = next(cycle)
            session.step()
            return value
        """),
    "an iterator over a list": ("it (list_iterator)", """
        it = iter([1, 2, 3, 4, 5, 6, 7, 8, 9])
        def step(i):
            value = next(it)
            session.step()
            return value
        """),
    "a generator": ("stream (generator)", """
        def numbers():
            n = 0
            while True:
                yield n
                n += 1
        stream = numbers()
        def step(i):
            value = next(stream)
            session.step()
            return value
        """),
    "an iterator over a DataLoader": ("it (_SingleProcessDataLoaderIter)", """
        it = iter(torch.utils.data.DataLoader(list(range(40)), batch_size=2))
        def step(i):
            value = next(it)
            session.step()
            return value
        """),
    "a module outside protect": ("ema.weight", """
        ema = nn.Linear(1000, 1000)
        def step(i):
            with torch.no_grad():
                ema.weight.mul_(0.5)
            session.step()
        """),
    "a large prefetched batch": ("X (Tensor)", """
        X = torch.zeros(1 << 19)
        def step(i):
            global X
            X = torch.ones(1 << 19) * i
            session.step()
        """),
    "a tensor that comes to require gradients": ("prompt", """
        prompt = torch.ones(2)
        def step(i):
            global prompt
            prompt = prompt * 2
            if i == 4:
                prompt.requires_grad_()
            session.step()
        """),
    "a loss with its graph": ("total", """
        total = 0.0
        def step(i):
            global total
            total = total + torch.ones(1, requires_grad=True)
            session.step()
        """),
    "a scheduler outside protect": ("scheduler (StepLR)", """
        model = nn.Linear(1, 1)
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
        scheduler.optimizer.step()
        def step(i):
            scheduler.step()
            session.step()
        """),
    "a scheduler between phases": ("scheduler (StepLR)", """
        model = nn.Linear(1, 1)
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters()), 1)
        scheduler.optimizer.step()
        def step(i):
            session.step()
        for i in session.batches(7):
            session.run(step, i)
            scheduler.step()
        """),
    "enumerate around a generator": ("enumerate", """
        def step(i):
            session.step()
        def logged(batches):
            for i in batches:
                yield i
        for number, i in enumerate(logged(session.batches(7))):
            session.run(step, i + number)
        """),
    "enumerate": ("enumerate", """
        def step(i):
            session.step()
        for number, i in enumerate(session.batches(7)):
            session.run(step, i + number)
        """),
    "an iterator between phases": ("it (of main())", """
        def step(i):
            session.step()
        def main():
            it = iter([3] * 20)
            for i in session.batches(7):
                session.run(step, next(it))
        main()
        """),
}  # fmt: skip


NOT_TOLD = ("a loss with its graph", "a tensor that comes to require gradients")


@pytest.mark.parametrize("way", REFUSED)
def test_uncarriable_variables_are_refused_or_reported(way: str) -> None:
    name, text = REFUSED[way]
    message = refusal(text)
    assert name in message
    if way in NOT_TOLD:  # no other process can have it, whoever is warned
        return
    assert ("session.enumerate" if way.startswith("enumerate") else "session.state") in message
    session = Session(stop=False)
    play(text if "session.run" in text else text + LOOP, session)
    assert any(name in note for note in session.notes)


def test_protected_state_is_not_inspected() -> None:
    text = """
        model, kept = nn.Linear(2, 2), [1]
        session.protected += [model, kept]
        def step(i):
            with torch.no_grad():
                model.weight.add_(1)
            kept.append(i)
            session.step()
        for i in session.batches(5):
            session.run(step, i)
        out += [path[-1][1] for path in session.script.carried.paths]
        """
    assert play(text, Session()) == ["out"]


def test_a_carried_value_that_becomes_unwritable_is_named() -> None:
    text = """
        kept = None
        def step(i):
            global kept
            kept = nn.Linear(1, 1) if i == 5 else i
            session.step()
        for i in session.batches(7):
            session.run(step, i)
        """
    with pytest.raises(PhaseError, match="kept, which the script changes, has become a Linear"):
        play(text, Session())
