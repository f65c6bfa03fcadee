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
