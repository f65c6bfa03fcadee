"""Variables in hooks and in attributes of libraries' objects, in a redo and in a successor."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play, refusal

from outlast.worker.script import reachable_values, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


HEAD = """
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.protected += [model, optimizer, *model.parameters()]
        def step(i):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (i + 1)).backward()
            optimizer.step()
            value = float(model.weight.grad.sum())
            session.step()
            return value
"""
LOOP = """
        for i in session.batches(8):
            out.append(session.run(step, i))
"""
EXACT = {
    "a hook of a parameter, an object": """
        class Clip:
            def __init__(self):
                self.norms = []
            def __call__(self, grad):
                self.norms.append(float(grad.norm()))
                return grad / max(self.norms) if len(self.norms) > 4 else grad
        model.weight.register_hook(Clip())
        """,
    "a hook of a module, with a closure": """
        def centred():
            state = {"n": 0, "mean": torch.zeros(2)}
            def hook(module, inputs, output):
                state["n"] += 1
                state["mean"] = state["mean"] + output.detach().mean(0) / state["n"]
                return output * state["mean"] if state["n"] > 4 else output
            return hook
        model.register_forward_hook(centred())
        """,
    "a hook before the optimizer's step, a method": """
        class Scale:
            calls = 0
            def before(self, optimizer, args, kwargs):
                self.calls += 1
                for p in model.parameters():
                    p.grad.mul_(self.calls)
        optimizer.register_step_pre_hook(Scale().before)
        """,
    "an attribute of a parameter": """
        for p in model.parameters():
            p.average = torch.zeros_like(p)
        def add(optimizer, args, kwargs):
            for p in model.parameters():
                p.average = 0.9 * p.average + p.grad
                p.grad.add_(p.average)
        optimizer.register_step_pre_hook(add)
        """,
    "an attribute of a parameter, made by the first step": """
        def add(optimizer, args, kwargs):
            for p in model.parameters():
                if not hasattr(p, "average"):
                    p.average = torch.zeros_like(p)
                p.average.add_(p.grad)
                p.grad.add_(p.average)
        optimizer.register_step_pre_hook(add)
        """,
    "an attribute of torch's optimizer": """
        optimizer.calls, optimizer.norms = 0, []
        def count(optimizer, args, kwargs):
            optimizer.calls += 1
            optimizer.norms.append(optimizer.calls)
            for p in model.parameters():
                p.grad.mul_(sum(optimizer.norms))
        optimizer.register_step_pre_hook(count)
        """,
    "a tensor and a list in a namespace": """
        import types
        space = types.SimpleNamespace(mean=torch.zeros(2), seen=[])
        def hook(module, inputs):
            space.mean = space.mean * 0.5 + inputs[0].sum()
            space.seen.append(float(space.mean.sum()))
            return inputs[0] * sum(space.seen)
        model.register_forward_pre_hook(hook)
        """,
}
METERS = """
        class Smoothed:
            def __init__(self):
                self.window, self.total = collections.deque(maxlen=2), 0
            def update(self, value):
                self.window.append(value)
                self.total += value
        meters = collections.defaultdict(Smoothed)
        def step(i):
            session.step()
            return i
        for i in session.batches(9):
            loss = session.run(step, i)
            meters["loss"].update(loss)
            if i > 4:
                meters["late"].update(loss)
            out.append([(name, each.total, list(each.window)) for name, each in meters.items()])
        """


def test_objects_that_a_defaultdict_makes_late_are_carried() -> None:
    alone = play(METERS, Plain())
    assert play(METERS, Session()) == alone
    for place in (6, 7):
        with pytest.raises(DiedError) as died:
            play(METERS, Session(die=place))
        assert play(METERS, Session(slot=died.value.slot, begin=place)) == alone


INSIDE = """
        class Meter:
            def __init__(self):
                self.total, self.count = 0, 0
            def update(self, value):
                self.total += value
                self.count += 1
        class Log:
            def __init__(self):
                self.meters = collections.defaultdict(Meter)
            def update(self, **values):
                for name, value in values.items():
                    self.meters[name].update(value)
        log = Log()
        def step(i):
            log.update(loss=i + 1)
            if i > 4:
                log.update(late=i)
            session.step()
            return [(name, each.total, each.count) for name, each in log.meters.items()]
        for i in session.batches(9):
            out.append(session.run(step, i))
        """


@pytest.mark.parametrize("fault", ["", "between", "within"])
def test_objects_that_a_phase_makes_in_a_defaultdict_are_made_anew(
    fault: Literal["", "between", "within"],
) -> None:
    alone = play(INSIDE, Plain())
    assert play(INSIDE, Session(fault=fault)) == alone
    assert play(INSIDE, Session(redo=6)) == alone
    for place in (1, 7):
        with pytest.raises(DiedError) as died:
            play(INSIDE, Session(die=place))
        assert play(INSIDE, Session(slot=died.value.slot, begin=place)) == alone
    text = INSIDE.replace("defaultdict(Meter)", "OrderedDict(loss=Meter())")
    text = text.replace("self.meters[name].", "self.meters.setdefault(name, Meter()).")
    assert "a phase adds log.meters['late']" in refusal(text).replace("played.", "")


def test_objects_that_a_dict_gets_late_are_refused_by_name() -> None:
    text = METERS.replace("defaultdict(Smoothed)", "OrderedDict(loss=Smoothed())")
    text = text.replace('meters["late"].', 'meters.setdefault("late", Smoothed()).')
    assert "adds played.meters['late'] (Smoothed)" in refusal(text)


@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    text = HEAD + EXACT[way] + LOOP
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    assert play(text, Session(redo=5)) == alone
    for place in (1, 4):
        with pytest.raises(DiedError) as died:
            play(text, Session(die=place))
        assert play(text, Session(slot=died.value.slot, begin=place)) == alone


def test_the_state_of_an_optimizer_is_not_a_variable() -> None:
    text = """
        model = nn.Linear(2, 2)
        class Lazy(torch.optim.Optimizer):
            def step(self):
                for group in self.param_groups:
                    group["k"] += 1
                    for p in group["params"]:
                        if "z" not in self.state[p]:
                            self.state[p]["z"] = p.detach().clone()
        optimizer = Lazy(model.parameters(), {"k": 0})
        session.protected += [model, optimizer, *model.parameters()]
        def step(i):
            session.step()
            optimizer.step()
        for i in session.batches(5):
            session.run(step, i)
        out += [path[-1][1] for path in session.script.carried.paths]
        """
    assert play(text, Session()) == ["out"]


REFUSED = {
    "a dict by member of an enumeration": ("meters (dict)", """
        import enum
        class Split(enum.Enum):
            TRAIN = 1
        class Meter:
            total = 0.0
        meters = {Split.TRAIN: Meter()}
        def step(i):
            meters[Split.TRAIN].total += i
            session.step()
        """),
    "an asynchronous generator": ("stream, a async_generator", """
        async def numbers():
            yield 1
        stream = numbers()
        def step(i):
            stream.asend(None).close()
            session.step()
        """),
    "a call until a sentinel": ("it, a callable_iterator", """
        it = iter(list(range(100)).pop, 0)
        def step(i):
            next(it)
            session.step()
        """),
    "a future of the next batch": ("future (Future)", """
        from concurrent.futures import Future
        def made(value):
            future = Future()
            future.set_result(value)
            return future
        future = made(0)
        def step(i):
            session.step()
        for i in session.batches(7):
            x = future.result()
            future = made(i + 1)
            session.run(step, x)
        """),
    "a quasi-random sequence": ("engine (SobolEngine)", """
        engine = torch.quasirandom.SobolEngine(2)
        def step(i):
            session.step()
        for i in session.batches(7):
            x = engine.draw(3)
            session.run(step, i)
        """),
    "seeds that are spawned": ("seeds (SeedSequence)", """
        seeds = np.random.SeedSequence(1)
        def step(i):
            session.step()
        for i in session.batches(7):
            rng = np.random.default_rng(seeds.spawn(1)[0])
            session.run(step, i)
        """),
    "a value that processes share": ("level (Synchronized)", """
        import multiprocessing
        level = multiprocessing.Value("i", 0)
        def step(i):
            session.step()
        for i in session.batches(7):
            level.value += 1
            session.run(step, i)
        """),
    "a queue that a thread fills": ("ready, a Queue", """
        import queue
        ready = queue.Queue()
        for number in range(99):
            ready.put(number)
        def step(i):
            session.step()
        for i in session.batches(7):
            session.run(step, ready.get())
        """),
    "an array of the standard library": ("counts (array)", """
        import array
        counts = array.array("d", [0.0])
        def step(i):
            counts[0] += i + 1
            session.step()
        """),
    "a dict class of the standard library": ("config (UserDict)", """
        config = collections.UserDict(n=0)
        def step(i):
            config["n"] += i + 1
            session.step()
        """),
    "a file whose lines are iterated over": ("corpus, a TextIOWrapper", """
        corpus = open(LICENSE)
        def step(i):
            next(corpus)
            session.step()
        try:
            for i in session.batches(7):
                session.run(step, i)
        finally:
            corpus.close()
        """),
}  # fmt: skip


@pytest.mark.parametrize("way", REFUSED)
def test_iterators_without_a_readable_position_are_refused_by_name(
    way: str, pytestconfig: pytest.Config
) -> None:
    name, text = REFUSED[way]
    license_ = str(pytestconfig.rootpath / "LICENSE")
    assert name in refusal(text.replace("LICENSE", repr(license_)))


def test_the_position_in_a_file_is_carried(pytestconfig: pytest.Config) -> None:
    license_ = str(pytestconfig.rootpath / "LICENSE")
    text = f"""
        corpus = open({license_!r})
        log = open("/dev/null", "w")
        def step(i):
            line = corpus.readline()
            session.step()
            return line
        try:
            for i in session.batches(9):
                out.append((session.run(step, i), corpus.readline()))
                print(i, file=log)
        finally:
            corpus.close()
            log.close()
        """
    alone = play(text, Plain())
    assert play(text, Session()) == alone
    with pytest.raises(DiedError) as died:
        play(text, Session(die=5))
    assert play(text, Session(slot=died.value.slot, begin=5)) == alone


def test_a_queue_that_a_thread_empties_is_no_source() -> None:
    text = """
        import queue, threading
        class Writer(threading.Thread):
            def __init__(self):
                super().__init__(daemon=True)
                self.inbox = queue.Queue()
            def run(self):
                while self.inbox.get() is not None:
                    pass
        writer, rates = Writer(), {}
        writer.start()
        def step(i):
            session.step()
            return rates.get(i, 1)
        for i in session.batches(5):
            writer.inbox.put(session.run(step, i))
            out.append(i)
        writer.inbox.put(None)
        writer.join(60)
        """
    assert play(text, Session()) == [0, 1, 2, 3, 4]
