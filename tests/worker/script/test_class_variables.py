"""Class variables and names bound by the first step, in a redo and in a successor."""

from __future__ import annotations

import pytest
from tests.worker.script.simulated_phases import DiedError, Plain, Session, play

from outlast.worker.script import reachable_values, value_paths


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
