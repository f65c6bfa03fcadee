"""States of random generators: restored ones go on with the same numbers and the same children."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from outlast import random_state
from outlast.errors import UsageError

BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


def numbers(generator: np.random.Generator) -> list[float]:
    """Draw from a generator, from its children, and from a child of a child."""
    children = generator.spawn(2)
    (grandchild,) = children[1].spawn(1)
    return [each.random() for each in (generator, *children, grandchild)]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("seed", [3, [1, 2], None])
def test_children_after_a_restore_are_equal(bits: Any, seed: Any) -> None:
    generator = np.random.Generator(bits(seed))
    generator.spawn(1)
    saved = random_state.states({"g": generator})
    expected = numbers(generator)
    for other in (generator, np.random.Generator(bits()), random_state.make_generator(saved["g"])):
        assert isinstance(other, np.random.Generator)
        random_state.restore_state({"g": other}, saved)
        assert numbers(other) == expected


def test_states_of_earlier_releases_have_no_seeds_and_leave_them() -> None:
    generator = np.random.default_rng(5)
    saved = random_state.states({"g": generator})
    del saved["g"]["seed_seq"]
    first = generator.random()
    generator.spawn(2)
    random_state.restore_state({"g": generator}, saved)
    assert generator.random() == first
    seeds: Any = generator.bit_generator.seed_seq
    assert seeds.n_children_spawned == 2


@pytest.mark.parametrize("kind", [random.Random, torch.Generator, np.random.RandomState])
def test_a_made_generator_continues(kind: Any) -> None:
    generator = kind()
    saved = random_state.states({"g": generator})["g"]
    made: Any = random_state.make_generator(saved)
    assert random_state.same(saved, random_state.states({"g": made})["g"])


def test_a_generator_without_state_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'dice' is a random\.SystemRandom"):
        random_state.states({"dice": random.SystemRandom()})


def fresh() -> dict[str, Any]:
    """Read the process's generators by their own functions."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


# Second normal numbers are kept beside the words of a generator, which then do not change.
DRAWS: list[Any] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.seed(3),
    lambda: random.shuffle([1, 2, 3]),
    np.random.random,
    np.random.standard_normal,
    lambda: np.random.randn(1),
    lambda: np.random.seed(4),
    lambda: torch.rand(1),
    lambda: torch.randn(1),
    lambda: torch.randn(17),
    lambda: torch.manual_seed(5),
    lambda: None,
]


@pytest.mark.parametrize("seed", range(20))
def test_states_that_are_kept_are_those_of_the_generators(seed: int) -> None:
    """Draws, seeds and restored states in random order: the kept state is never another."""
    dice = random.Random(seed)
    saved = [fresh()]
    with random_state.preserved():
        for _ in range(150):
            if dice.random() < 0.2:
                saved.append(fresh())
            if dice.random() < 0.3:
                name = dice.choice(["python", "numpy", "torch"])
                random_state.restore({name: dice.choice(saved)[name]})
            else:
                dice.choice(DRAWS)()
            assert random_state.same(random_state.snapshot(), fresh())


def test_an_unmoved_generator_is_not_read_again() -> None:
    first, second = random_state.snapshot(), random_state.snapshot()
    assert all(first[name] is second[name] for name in first)


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy 1.24 has it")
def test_other_bits_of_numpy_are_read_each_time() -> None:
    own = np.random.get_bit_generator()
    try:
        for bits in BITS:
            np.random.set_bit_generator(bits(3))
            for _ in range(3):
                np.random.standard_normal()
                assert random_state.same(random_state.snapshot(), fresh())
    finally:
        np.random.set_bit_generator(own)
