"""Reading of IPMI system event logs."""

from __future__ import annotations

from datetime import timedelta, timezone

import pytest
from tests.node_logs.log_samples import SEL, found, unread

from outlast.node_logs.ipmi_events import findings

DAY_S = 1_681_257_600  # 2023-04-12


def test_entries() -> None:
    readings = list(findings(SEL, cluster="c", node="n"))
    told = [(one.t_ns // 10**9 - DAY_S, one.symptom, one.severity) for one in found(readings)]
    assert told == [
        (36_932, "main-memory", "warn"),
        (36_933, "main-memory", "now"),
        (36_961, "pcie", "now"),
        (80_162, "thermal", "drain"),
        (37_022, "thermal", "healthy"),
        (37_140, "other", "unknown"),
        (37_200, "services", "unknown"),
    ]
    (unplaced,) = unread(readings)
    assert unplaced.line == 7 and "did not know the time" in unplaced.reason
    assert found(readings)[0].device == "Memory #0x87"


def test_the_time_zone_is_an_argument() -> None:
    line = "1 | 04/12/2023 | 10:15:32 | Processor CPU1 | IERR | Asserted"
    east = timezone(timedelta(hours=2))
    (one,) = found(list(findings(line, cluster="c", node="n", zone=east)))
    assert one.t_ns // 10**9 - DAY_S == 36_932 - 7200 and one.severity == "now"


@pytest.mark.parametrize(
    "line",
    ["garbage", "1 | 2 | 3", "zz | 04/12/23 | 10:15:32 | Memory | Correctable ECC | Asserted"],
)
def test_other_lines_are_unread(line: str) -> None:
    (one,) = unread(list(findings(line, cluster="c", node="n")))
    assert one.reason == "no entry of an event log"


@pytest.mark.parametrize(
    ("said", "severity"),
    [("Power Unit #0x1 | Failure detected", "warn"),
     ("Power Unit #0x1 | Power off/down", ""),
     ("Cable/Interconnect GPU1 | Configuration Error", "warn"),
     ("Cable/Interconnect GPU1 | Connected", "")],
)  # fmt: skip
def test_a_fault_of_what_reports_ordinary_events_too(said: str, severity: str) -> None:
    line = f"1 | 04/12/2023 | 10:15:32 | {said} | Asserted"
    assert [one.severity for one in found(list(findings(line, cluster="c", node="n")))] == (
        [severity] if severity else []
    )


def test_a_date_that_is_none_is_unread() -> None:
    line = "1 | 13/45/2023 | 10:15:32 | Memory | Correctable ECC | Asserted"
    (one,) = unread(list(findings(line, cluster="c", node="n")))
    assert "no such date" in one.reason


@pytest.mark.parametrize(
    "said",
    ["SEL has no entries", "", "2 | 04/12/23 | 10:15:32 | Button | Power Button pressed | Asserted",
     "3 | 04/12/2023 | 10:15:32 | Event Logging Disabled | Log area reset/cleared | Asserted"],
)  # fmt: skip
def test_ordinary_entries_give_no_finding(said: str) -> None:
    assert list(findings(said, cluster="c", node="n")) == []
