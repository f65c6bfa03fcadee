"""The language of --fault."""

from __future__ import annotations

import pytest

from outlast.core.faults import expand, parse
from outlast.errors import ConfigError


def test_every_part_is_read() -> None:
    spec = parse("stop:rank=1,step=5,phase=backward,for=2.5,times=3")
    assert (spec.kind, spec.rank, spec.step, spec.where) == ("stop", 1, 5, "backward")
    assert (spec.for_s, spec.times) == (2.5, 3)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kil:rank=1", "kil"),
        ("kill:rank", "rank"),
        ("kill:rnk=1", "rnk"),
        ("kill:rank=x", "x"),
        ("kill:phase=lunch", "lunch"),
        ("", "''"),
    ],
)
def test_what_is_wrong_is_named(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse(text)


def test_random_faults_follow_their_seed() -> None:
    spec = parse("kill:random=5")
    drawn = expand(spec, 4, (2, 30), seed=7)
    assert drawn == expand(spec, 4, (2, 30), seed=7) != expand(spec, 4, (2, 30), seed=8)
    assert all(0 <= f.rank < 4 and 2 <= f.step <= 30 for f in drawn)
    assert [parse(f.text) for f in drawn] == drawn
