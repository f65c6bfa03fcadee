"""Parsing of fault specifications (`--fault`)."""

from __future__ import annotations

import pytest

from outlast.controller.fault_spec import expand, parse
from outlast.errors import ConfigError


def test_every_part_is_read() -> None:
    spec = parse("stop:rank=1,step=5,phase=backward,for=2.5,times=3")
    assert (spec.kind, spec.rank, spec.step, spec.where) == ("stop", 1, 5, "backward")
    assert (spec.for_s, spec.times) == (2.5, 3)
    spec = parse("kill:random=3,steps=5-50")
    assert (spec.random, spec.steps) == (3, (5, 50))
    assert parse("kill:rank=1,after=0.5").after_s == 0.5
    assert parse("kill:spare=1").spare == 1


def test_where_it_strikes_unless_told() -> None:
    assert parse("kill:step=10").where == "forward"
    assert parse("full:step=10").where == "checkpoint"
    assert parse("flip:step=10").where == "committed"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kil:rank=1", "kil"),
        ("", "''"),
        ("kill:rank", "'rank' is not key=value"),
        ("kill:rnk=1", "unknown key 'rnk' .known: after, bit, cause, factor, for"),
        ("kill:generation=2", "generation"),
        ("kill:rank=x", "'x' is not a number"),
        ("kill:rank=-1", "rank=-1 must be at least 0"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("kill:step=-4", "step=-4 must be at least 1"),
        ("kill:step=0", "at least 1"),
        ("kill:times=0", "times=0 must be at least 1"),
        ("kill:random=-2", "random=-2 must be at least 1"),
        ("kill:spare=-1", "at least 0"),
        ("slow:for=-3", "for=-3 must be seconds above zero"),
        ("slow:for=nan", "for=nan must be"),
        ("slow:for=inf", "for=inf must be"),
        ("kill:after=0", "after=0 must be"),
        ("kill:random=2,steps=9", "'' is not a number"),
        ("kill:random=2,steps=9-3", "FIRST-LAST"),
        ("kill:phase=lunch", "'lunch' .known: setup, forward"),
        ("kill:steps=2-9", "steps is not allowed with kill"),
        ("kill:random=2,step=4", "step is not allowed with random"),
        ("kill:random=2,times=4", "times is not allowed with random"),
        ("kill:spare=0,rank=1", "rank is not allowed with spare"),
        ("kill:rank=1,after=3,step=5", "step is not allowed with after"),
        ("raise:after=3", "after is only for kill, stop"),
        ("reset:spare=0", "spare is only for kill, stop"),
        ("kill:rank=1,for=3", "for is only for stop, slow"),
        ("full:phase=forward", "phase=checkpoint"),
        ("slow:factor=1", "factor=1 must be above 1"),
        ("slow:factor=nan", "factor=nan must be above 1"),
        ("slow:factor=inf", "factor=inf must be above 1"),
        ("slow:factor=2,for=3", "for is not allowed with factor"),
        ("slow:factor=2,times=3", "times is not allowed with factor"),
        ("kill:rank=1,factor=2", "factor is only for slow"),
        ("kill:tensor=model.*", "tensor is only for flip"),
        ("kill:cause=data", "cause is only for nan"),
        ("nan:cause=luck", "'luck' .known: once, device, data"),
        ("nan:cause=data,times=2", "times is not allowed with cause"),
        ("nan:phase=apply", "only for phase=forward and phase=backward"),
    ],
)
def test_what_is_wrong_is_named(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        parse(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kill:rank=4", "the ranks 0 to 3"),
        ("kill:rank=99,after=3", "the ranks 0 to 3"),
        ("kill:spare=2", "the spares 0 to 1"),
        ("slow:random=9,rank=0,steps=1-8", "only 8 places"),
    ],
)
def test_what_the_run_does_not_have_is_named(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        expand(parse(text), 4, 2, seed=0)


def test_no_spare_at_all_is_said() -> None:
    with pytest.raises(ConfigError, match="this run has no spare"):
        expand(parse("kill:spare=0"), 4, 0, seed=0)


@pytest.mark.parametrize("kind", ["kill", "stop", "raise", "reset", "hang", "slow", "full"])
def test_random_faults_follow_their_seed(kind: str) -> None:
    spec = parse(f"{kind}:random=5,steps=2-30")
    drawn = expand(spec, 4, 0, seed=7)
    assert drawn == expand(spec, 4, 0, seed=7) != expand(spec, 4, 0, seed=8)
    assert all(0 <= f.rank < 4 and 2 <= f.step <= 30 and f.kind == kind for f in drawn)
    assert [parse(f.text) for f in drawn] == drawn
    assert len({f.marker(0) for f in drawn}) == 5


def test_random_faults_keep_what_is_given() -> None:
    drawn = expand(parse("stop:random=4,rank=2,phase=vote,for=0.25"), 4, 0, seed=1)
    assert {(f.rank, f.where, f.for_s) for f in drawn} == {(2, "vote", 0.25)}
    assert len(expand(parse("slow:random=8,rank=0,steps=1-8"), 4, 0, seed=1)) == 8


def test_any_other_fault_stays_as_it_is() -> None:
    spec = parse("kill:rank=3,step=10")
    assert expand(spec, 4, 0, seed=7) == [spec]
