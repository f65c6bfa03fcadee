"""Arbitrary text: every reader ends without an error, and its output can be stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node_logs.log_samples import SEL, SMALL, XID

from outlast.node_logs import dcgm, ipmi_events, kernel_log, nvidia_smi
from outlast.node_logs.log_readings import LogClock, Reading, UnreadText, fold_storms

HEADS = ("[ 1.5] ", "4,1,2,-;", "[Sun Feb 23 16:24:18 2025] ", "Feb 29 24:60:61 h kernel: ",
         "2025-99-99T00:00:00Z h kernel: ", "Sun 2025-02-23 16:24:18 +xx h kernel: ",
         '{"MESSAGE":', "999999999999999.9 h kernel: ", "[Feb 30 2025 16:24:18] [ERROR] ",
         "[99999999999999999999.0] ")  # fmt: skip
PARTS = (*HEADS, XID, "NVRM: Xid (", "SXid (PCI:): ", "EDAC MC0: 1 UE x", "<nvidia_smi_log",
         "</nvidia_smi_log>", "<!ENTITY", "index, uuid\n", "[N/A]", "\n", "\0", "\udcff", "١٢",
         " | ", "{", "[", '"DCGM Diagnostic":', "GPU 1: ", "Link 2: ")  # fmt: skip
PIECES = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=12)), max_size=8)


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    """A good text with some of it replaced."""
    text = draw(st.sampled_from(SMALL))
    begin = draw(st.integers(0, len(text)))
    end = begin + draw(st.integers(0, 40))
    return text[:begin] + "".join(draw(PIECES)) + text[end:]


TEXTS = st.one_of(spoilt(), PIECES.map("".join))
WHO: dict[str, Any] = {"cluster": "c", "node": "n"}
READERS: tuple[Callable[[str], Iterable[Reading]], ...] = (
    lambda text: kernel_log.findings(text, **WHO, clock=LogClock(0, 10**18, 0)),
    lambda text: dcgm.findings(text, **WHO, t_ns=0, level=3),
    lambda text: nvidia_smi.findings(text, **WHO, t_ns=0),
    lambda text: ipmi_events.findings(text, **WHO),
)


@given(TEXTS)
@settings(max_examples=150)
def test_no_reader_raises_for_any_text(text: str) -> None:
    for reader in READERS:
        for one in reader(text):
            if isinstance(one, UnreadText):
                assert one.reason and len(one.text) <= 400 and one.line <= text.count("\n") + 1
            else:
                assert 0 <= one.t_ns < 2**63 and len(one.detail) <= 1000


@given(TEXTS)
@settings(max_examples=50)
def test_a_dead_gpu_is_found_within_arbitrary_text(text: str) -> None:
    line = f"[ 7.0] {XID}"
    for lines in (f"{text}\n{line}", f"{line}\n{text}"):
        readings = fold_storms(READERS[0](lines), 0.0)
        assert any(not isinstance(one, UnreadText) and one.code == "XID 79" for one in readings)


@given(spoilt())
@settings(max_examples=50)
def test_a_diagnostic_is_never_healthy_and_in_trouble_at_once(text: str) -> None:
    severities = {one.severity for one in READERS[1](text) if not isinstance(one, UnreadText)}
    assert severities and (severities == {"healthy"} or "healthy" not in severities)


def test_lines_of_any_kind_are_read_one_by_one() -> None:
    """A log of any length: nothing waits for its end."""
    entries = iter(SEL.splitlines())
    first = next(iter(ipmi_events.findings(entries, **WHO)))
    assert not isinstance(first, UnreadText) and next(entries).startswith("   2")
