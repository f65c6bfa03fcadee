"""Repeated log events folded into one finding with its count."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outlast.log_records import Finding
from outlast.node_logs.log_readings import Reading, UnreadText, finding_count, fold_storms, last_ns

S = 10**9


def finding(second: int, code: str = "XID 95", device: str = "0000:9b:00.0") -> Finding:
    return Finding(
        t_ns=second * S, cluster="c", node="n", check="kernel.xid", symptom="gpu-memory",
        severity="now", code=code, device=device, detail=f"line {second}",
    )  # fmt: skip


def folded(readings: Sequence[Reading], window_s: float) -> list[Finding]:
    return [one for one in fold_storms(readings, window_s) if isinstance(one, Finding)]


def test_a_storm_is_as_many_findings_as_there_are_different_ones() -> None:
    storm = [finding(n // 100, device=f"GPU {n % 29}") for n in range(29_000)]
    found = folded(storm, 3600)
    assert len(found) == 29 and {finding_count(one) for one in found} == {1000}
    assert found[0].t_ns == 0 and found[0].detail == "line 0 {1000 times in 289 s}"


def test_a_window_begins_with_its_first() -> None:
    found = folded([finding(second) for second in (0, 60, 61, 120, 200)], 60)
    assert [(one.t_ns // S, finding_count(one)) for one in found] == [(0, 2), (61, 2), (200, 1)]
    assert found[-1].detail == "line 200"  # what came once is as it was


def test_the_last_time_of_a_storm_is_exact() -> None:
    moments = [0, 999_999_999, 17 * S + 5]
    (one,) = folded([replace(finding(0), t_ns=t_ns) for t_ns in moments], 60)
    assert one.t_ns == 0 and last_ns(one) == 17 * S + 5
    assert one.detail == "line 0 {3 times in 17.000000005 s}"


def test_unread_lines_pass_through() -> None:
    odd = UnreadText(7, "why", "what")
    assert next(fold_storms([finding(0), odd, finding(1)], 60)) == odd


def test_other_severities_and_nodes_stay_apart() -> None:
    other = Finding(t_ns=0, cluster="c", node="m", check="kernel.xid", symptom="gpu-memory",
                    severity="now", code="XID 95", device="0000:9b:00.0", detail="")  # fmt: skip
    assert len(folded([finding(0), other, finding(1, code="XID 94")], 60)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from("ab")), max_size=40),
    st.integers(0, 200),
    st.integers(0, 200),
)
@settings(max_examples=60)
def test_the_sum_of_times_is_kept_also_when_folded_again(
    told: list[tuple[int, str]], first_s: int, then_s: int
) -> None:
    once = folded([finding(second, device=device) for second, device in told], first_s)
    twice = folded([*once], then_s)
    assert sum(map(finding_count, once)) == sum(map(finding_count, twice)) == len(told)
    assert max(map(last_ns, twice), default=0) == max([t * S for t, _ in told], default=0)
    assert {one.device for one in twice} == {device for _, device in told}
    assert min([one.t_ns for one in twice], default=0) == min(
        [second * S for second, _ in told], default=0
    )
