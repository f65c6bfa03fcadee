"""Numbers of draws between states of generators: counted, and applied again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outlast import random_state
from outlast.data import draw_counts
from outlast.data.draw_counts import CountedStates, advanced, count_between
from outlast.data.epoch_order import IteratorReplay
from outlast.errors import UsageError

MAKERS: dict[str, Callable[[], random_state.Generator]] = {
    "torch": lambda: torch.Generator().manual_seed(5),
    "random": lambda: random.Random(5),
    "numpy, older": lambda: np.random.RandomState(5),
    "numpy": lambda: np.random.default_rng(5),
}
DRAWS = (0, 1, 2, 623, 624, 625, 1248, 3000)


def state_of(generator: random_state.Generator) -> Any:
    return random_state.states({"it": generator})["it"]


def draw(generator: random_state.Generator, count: int) -> None:
    for _ in range(count):
        if isinstance(generator, torch.Generator):
            torch.randint(0, 9, (), generator=generator)
        elif isinstance(generator, random.Random):
            generator.getrandbits(32)
        elif isinstance(generator, np.random.RandomState):
            generator.tomaxint()
        else:
            generator.random()


def draw_normal(generator: random_state.Generator) -> None:
    """One normal number: some generators make two and keep the other."""
    if isinstance(generator, torch.Generator):
        torch.randn((), generator=generator)
    elif isinstance(generator, random.Random):
        generator.gauss()
    else:
        generator.standard_normal()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("first", DRAWS)
def test_a_state_is_found_again_from_its_count(kind: str, first: int) -> None:
    for between in DRAWS:
        generator = MAKERS[kind]()
        draw(generator, first)
        before = state_of(generator)
        draw(generator, between)
        draw_normal(generator)
        after = state_of(generator)
        count = count_between(before, after)
        assert count is not None and count.draws >= between
        fresh = MAKERS[kind]()
        random_state.restore_state({"it": fresh}, {"it": advanced(before, count)})
        for _ in range(3):
            draw_normal(generator)
            draw_normal(fresh)
            assert random_state.same(state_of(fresh), state_of(generator))
        draw(generator, 700)
        draw(fresh, 700)
        assert _next(fresh) == _next(generator)
        assert count_between(before, after, guess=count.draws) == count


def _next(generator: random_state.Generator) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.randn((), generator=generator))
    return float(generator.random())


def test_states_of_other_generators_have_no_distance() -> None:
    one, other = MAKERS["numpy"](), np.random.default_rng(6)
    assert count_between(state_of(one), state_of(other)) is None
    assert count_between(state_of(one), state_of(MAKERS["random"]())) is None


def test_a_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_counts, "SEARCHED_MAX", 2000)
    generator = MAKERS["torch"]()
    before = state_of(generator)
    torch.rand(9000, generator=generator)
    assert count_between(before, state_of(generator)) is None


def test_equal_counts_in_a_row_take_the_place_of_one() -> None:
    counted, generator = CountedStates(), MAKERS["random"]()
    for number in range(50):
        before = state_of(generator)
        draw(generator, 3 if number < 40 else 4)
        assert counted.add(number, {"it": state_of(generator)}, {"it": before}) == 0
    assert [run[:2] for run in counted.runs] == [[0, 40], [40, 10]] and not counted.whole


def test_draws_in_turn_that_cannot_be_counted_end_the_run_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draw_counts, "SEARCHED_MAX", -1)
    replay = IteratorReplay({})

    def draw_in_turn() -> None:
        for _ in range(40):
            with replay.drawing():
                torch.rand(1)
            torch.rand(1)

    with pytest.raises(UsageError, match=r"cannot be counted.*\(the process's torch\)"):
        draw_in_turn()
