"""Named tuples, frozen dataclasses and members of enumerations in lists, tuples and deques."""

from __future__ import annotations

import pytest
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play

from outlast.worker.script import reachable_values, value_paths


@pytest.fixture(autouse=True)
def _scripts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests are no script's."""
    for module in (value_paths, reachable_values):
        monkeypatch.setattr(module, "is_own_file", lambda name: name.startswith("<script"))


HEAD = """
        import dataclasses, enum
        Transition = collections.namedtuple("Transition", "state action reward")
        class Stage(enum.Enum):
            WARM = 1
            MAIN = 2
        @dataclasses.dataclass(frozen=True)
        class Result:
            step: int
            stage: Stage
            window: collections.deque
"""
EXACT = {
    "a replay buffer of named tuples": """
        memory = collections.deque(maxlen=5)
        def step(i):
            batch = [*memory][-3:]
            session.step()
            return sum(each.reward + float(each.state.sum()) for each in batch)
        for i in session.batches(9):
            out.append(session.run(step, i))
            memory.append(Transition(np.full(2, i), torch.tensor(i), i / 2))
            assert memory.maxlen == 5 and type(memory[0]) is Transition
        """,
    "a history of frozen dataclasses, written by the step": """
        history = []
        def step(i):
            stage = Stage.MAIN if i > 3 else Stage.WARM
            history.append(Result(i, stage, collections.deque([i], maxlen=2)))
            session.step()
            return sum(each.step for each in history if each.stage is stage)
        for i in session.batches(9):
            out.append(session.run(step, i))
            out.append([(*each.window, each.window.maxlen) for each in history])
        """,
    "stages in a list, and a tuple": """
        stages, last = [], (0, Stage.WARM)
        def step(i):
            session.step()
            return i
        for i in session.batches(9):
            stages.append(last[1])
            last = session.run(step, i), Stage(1 + i % 2)
            out.append([each.name for each in stages])
        """,
}


@pytest.mark.parametrize("way", EXACT)
def test_a_redo_and_a_successor_compute_what_the_script_alone_computes(way: str) -> None:
    text = HEAD + EXACT[way]
    alone = play(text, Plain())
    assert play(text, Session(redo=5)) == alone
    with pytest.raises(DiedError) as died:
        play(text, Session(die=5))
    assert play(text, Session(slot=died.value.slot, begin=5)) == alone
