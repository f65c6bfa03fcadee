"""NVLink states from nvidia-smi: inactive, slow and absent links."""

from __future__ import annotations

from tests.node_logs.log_samples import LINKS, found, unread

from outlast.node_logs.nvidia_smi import GpuLinks, link_findings, read_links


def test_links_by_gpu() -> None:
    assert list(read_links(LINKS)) == [
        GpuLinks(0, "GPU-aaaa", {0: 25.0, 1: None}),
        GpuLinks(1, "GPU-bbbb", {0: 12.5, 1: 25.0}),
        GpuLinks(2, "GPU-cccc", {0: None}),
    ]


def test_troubles_of_links() -> None:
    told = found(list(link_findings(LINKS, cluster="c", node="n", t_ns=7)))
    assert [(one.device, one.severity, one.detail) for one in told] == [
        ("GPU-aaaa", "now", "link 1 is down"),
        ("GPU-bbbb", "warn", "link 0 has 12.5 GB/s of 25"),
        ("GPU-cccc", "unknown", "none of 1 links is up"),
    ]


def test_no_answer_is_unknown_and_other_lines_are_unread() -> None:
    readings = list(link_findings("what is this\n", cluster="c", node="n", t_ns=7))
    assert [one.severity for one in found(readings)] == ["unknown"]
    assert [one.line for one in unread(readings)] == [1]
