"""Notes on incomplete logs, once for all logs."""

from __future__ import annotations

from outlast.fleet.lake import LakeSource
from outlast.fleet.report.fleet_report import hidden_record_notes


def log(name: str, *notes: str, odd: int = 0, rejected: int = 0) -> LakeSource:
    return LakeSource(
        id=name, name=name, format="sacct", digest="", size_bytes=1, read_ns=0, rows=1, records={},
        skipped={},
        rejects={"no time": rejected} if rejected else {}, since_ns=None, until_ns=None,
        odd={"it ends before it starts": odd} if odd else {}, notes=notes,
    )  # fmt: skip


def test_the_same_of_many_logs_is_one_line() -> None:
    days = [log(f"day{k}", "read without --duplicates", odd=k, rejected=2) for k in range(30)]
    assert hidden_record_notes([*days, log("dmesg", "its zone is not said")]) == [
        "day0 and 29 more: read without --duplicates",
        "dmesg: its zone is not said",
        "435 records are unusual, but kept: it ends before it starts",
        "60 rows could not be read: rejects/ of the lake has them",
    ]


def test_nothing_is_hidden() -> None:
    assert hidden_record_notes([log("day0"), log("day1")]) == []
