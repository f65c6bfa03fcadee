"""Arbitrary samples: every check ends with findings that are not empty."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.health.judged_samples import T0_NS, about, after

from outlast.health.check_contract import AnyCheck
from outlast.health.check_memory import CheckMemory
from outlast.health.node_examination import SHIPPED
from outlast.health.node_report import judge_samples, sorted_by_severity, worst_severity
from outlast.health.probe_runner import TakenSample

LEAVES: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8) | st.sampled_from(["up", "ACTIVE", "active", "ro", "nfs4", "cpu"]),
    int: st.integers(-(2**63), 2**63 - 1) | st.integers(0, 20),
    float: st.floats(),
    bool: st.booleans(),
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type as msgspec would decode them."""
    told = msgspec.inspect.type_info(kind)
    return _of(told)


def _of(told: Any) -> st.SearchStrategy[Any]:
    inspect = msgspec.inspect
    match told:
        case inspect.StructType():
            return st.builds(told.cls, **{one.name: _of(one.type) for one in told.fields})
        case inspect.UnionType():
            return st.one_of(*map(_of, told.types))
        case inspect.VarTupleType():
            return st.lists(_of(told.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_of, told.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(told.key_type), _of(told.value_type), max_size=3)
        case inspect.LiteralType():
            return st.sampled_from(told.values)
        case inspect.NoneType():
            return st.none()
        case inspect.StrType():
            return LEAVES[str]
        case inspect.IntType():
            return LEAVES[int]
        case inspect.FloatType():
            return LEAVES[float]
        case inspect.BoolType():
            return LEAVES[bool]
    raise AssertionError(told)


@pytest.mark.parametrize("check", SHIPPED, ids=lambda check: check.name)
@given(data=st.data())
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
def test_any_sample_is_judged(check: AnyCheck, data: st.DataObject) -> None:
    strategy = any_of(check.sample)
    first, second = data.draw(strategy), data.draw(strategy)
    wanted = {"services": {"active": ["a"]}, "links": {"expected": {"b": {"rate_gbps": 4}}}}
    memory = after(check, first, about(CheckMemory(), **wanted))
    for sample in (first, second):
        at = about(memory, 60, **wanted)
        taken = TakenSample(
            check=check.name, device="", t_ns=T0_NS, took_s=0.0,
            sample=msgspec.Raw(msgspec.json.encode(sample)),
        )  # fmt: skip
        found = judge_samples([taken], {check.name: check}, at)
        assert found.findings and worst_severity(found.findings)
        assert not any("the check failed" in one.detail for one in found.findings)
        assert all(one.detail for one in sorted_by_severity(found.findings))
