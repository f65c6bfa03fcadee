"""Output of nvidia-smi as samples and findings: CSV and XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, tzinfo
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from outlast.log_records import Finding, Symptom
from outlast.node_logs import gpu_samples
from outlast.node_logs.gpu_samples import (
    COLUMNS,
    ECC_FIELDS,
    PATHS,
    GpuLimits,
    GpuSample,
    make_sample,
)
from outlast.node_logs.log_readings import (
    LogClock,
    Reading,
    UnplacedError,
    UnreadText,
    cut_text,
    iso_ns,
    month_number,
    zoned_ns,
)

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

DEPTH_MAX = 64
ROOT = "<nvidia_smi_log"
END = "</nvidia_smi_log>"


def xml_samples(
    text: str, t_ns: int, zone: tzinfo = UTC
) -> tuple[list[GpuSample], list[UnreadText]]:
    """Return a sample per GPU; XML with entity declarations is rejected."""
    from xml.etree import ElementTree  # lazy: for start-up time

    if "<!ENTITY" in text:
        return [], [
            UnreadText(0, "it declares entities, which nvidia-smi never does", cut_text(text[:500]))
        ]
    begin = text.find(ROOT)
    end = text.rfind(END)
    if end < begin:
        return [], [UnreadText(0, "cut off: the end of the XML is missing", cut_text(text[-500:]))]
    try:
        # safe: without entity declarations nothing can be expanded
        root = ElementTree.fromstring(text[begin : end + len(END)])  # noqa: S314
    except (ElementTree.ParseError, ValueError) as error:
        return [], [UnreadText(0, f"no XML: {error}", cut_text(text[begin : begin + 500]))]
    at_ns = _time(root.findtext("timestamp", ""), t_ns, zone)
    driver = {"driver": root.findtext("driver_version", "")}
    samples = [
        _gpu_of_element(number, gpu, at_ns, driver)
        for number, gpu in enumerate(root.findall("gpu"))
    ]
    unread = []
    attached = root.findtext("attached_gpus", "").strip()
    if attached.isdecimal() and len(attached) < 5 and int(attached) != len(samples):
        unread = [UnreadText(0, f"{attached} GPUs are attached, {len(samples)} are in the XML", "")]
    return samples, unread


def _gpu_of_element(number: int, gpu: Element, t_ns: int, driver: dict[str, str]) -> GpuSample:
    values = dict(_flat_values(gpu))
    values.setdefault("pci/pci_bus_id", gpu.get("id", ""))
    fields = dict(PATHS)
    for field, text in zip(ECC_FIELDS, _errors(values), strict=True):
        if text is not None:
            values[field] = text
            fields[field] = field
    known = {name: text for name, text in values.items() if name in fields}
    return make_sample(known, fields, t_ns, {"index": number, **driver})


def _flat_values(gpu: Element) -> list[tuple[str, str]]:
    """Return the leaves of the tree by path."""
    found: list[tuple[str, str]] = []
    stack: list[tuple[str, Element, int]] = [(child.tag, child, 1) for child in gpu]
    while stack:
        path, element, depth = stack.pop()
        if len(element) and depth < DEPTH_MAX:
            stack += [(f"{path}/{child.tag}", child, depth + 1) for child in element]
        elif not len(element):
            found.append((path, (element.text or "").strip()))
    return found


def _errors(values: dict[str, str]) -> list[str | None]:
    """Return the memory errors in the order of ECC_FIELDS; None: not reported.

    Each is the total, or the sum over memory types, whose names depend on the driver version.
    """
    found: list[str | None] = []
    for period in ("volatile", "aggregate"):
        for word, bits in (("correctable", "single_bit"), ("uncorrectable", "double_bit")):
            start = f"ecc_errors/{period}/"
            total = values.get(f"{start}{bits}/total")
            parts = [
                text
                for name, text in values.items()
                if re.fullmatch(rf"[sd]ram_{word}\w*", name.removeprefix(start))
                and name.startswith(start)
            ]
            numbers = [int(text) for text in parts if re.fullmatch(r"[0-9]{1,18}", text)]
            if total is None and parts:
                odd = [text for text in parts if not re.fullmatch(r"[0-9]{1,18}", text)]
                total = str(sum(numbers)) if numbers else odd[0]
            found.append(total)
    return found


@cache
def _when() -> re.Pattern[str]:
    return re.compile(r"\w{3} (\w{3}) +(\d\d?) (\d\d:\d\d:\d\d) (\d{4})", re.ASCII)


def _time(text: str, t_ns: int, zone: tzinfo) -> int:
    found = _when().fullmatch(text.strip())
    try:
        return (
            zoned_ns((int(found[4]), month_number(found[1]), int(found[2])), found[3], zone)
            if found
            else t_ns
        )
    except UnplacedError:
        return t_ns


TEXT_MAX = 64 << 20  # characters
FAILURES: dict[str, Symptom] = {
    "Unable to determine the device handle": "gpu-unavailable",
    "No devices were found": "gpu-unavailable",
    "GPU is lost": "gpu-unavailable",
    "couldn't communicate with the NVIDIA driver": "gpu-driver",
    "Failed to initialize NVML": "gpu-driver",
    "Driver/library version mismatch": "gpu-driver",
}


class SmiSamples(NamedTuple):
    """Samples of the GPUs, failures of nvidia-smi, and unread text."""

    samples: list[GpuSample]
    failures: list[tuple[Symptom, str]]
    unread: list[UnreadText]


def read_samples(text: str, *, t_ns: int, zone: tzinfo = UTC) -> SmiSamples:
    """Parse CSV or XML, detected by the root element.

    `t_ns`: time of the query, for samples without a time; `zone`: time zone of the text.
    """
    if len(text) > TEXT_MAX:
        return SmiSamples([], [], [UnreadText(0, f"longer than {TEXT_MAX:,} characters", "")])
    before, root, _ = text.partition("<nvidia_smi_log")
    if not root:
        return _csv(text, t_ns, zone)
    failures = [failure for failure in map(_failure_finding, before.split("\n")) if failure]
    samples, unread = xml_samples(text, t_ns, zone)
    return SmiSamples(samples, failures, unread)


def findings(
    text: str,
    *,
    cluster: str,
    node: str,
    t_ns: int,
    zone: tzinfo = UTC,
    limits: GpuLimits | None = None,
) -> Iterator[Reading]:
    """Yield values beyond the limits, and an unknown finding if no GPU could be read."""
    got = read_samples(text, t_ns=t_ns, zone=zone)
    yield from got.unread

    def whole(symptom: Symptom, now: bool, detail: str) -> Finding:
        return Finding(
            t_ns=t_ns,
            cluster=cluster,
            node=node,
            check="nvidia-smi",
            symptom=symptom,
            severity="now" if now else "unknown",
            code="",
            device="",
            detail=detail,
        )

    for symptom, line in got.failures:
        yield whole(symptom, True, line)
    if not got.samples and not got.failures:
        yield whole("gpu-unavailable", False, "no GPU could be read")
    yield from gpu_samples.findings(
        got.samples, cluster=cluster, node=node, t_ns=t_ns, limits=limits or GpuLimits()
    )


def _failure_finding(line: str) -> tuple[Symptom, str] | None:
    """Return the symptom and line of an error message of nvidia-smi; None for other lines."""
    for words, symptom in FAILURES.items():
        if words in line:
            return symptom, cut_text(line)
    return None


def _csv(text: str, t_ns: int, zone: tzinfo) -> SmiSamples:
    samples: list[GpuSample] = []
    failures: list[tuple[Symptom, str]] = []
    unread: list[UnreadText] = []
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip():
            continue
        failure = _failure_finding(line)
        if failure and len(cells) != len(header):
            failures.append(failure)
            continue
        names = [cell.partition(" [")[0] for cell in cells]
        if any(name in COLUMNS for name in names) or names[0] == "timestamp":
            header = names
        elif not header:
            unread.append(UnreadText(number, "no header before it", cut_text(line)))
        elif len(cells) != len(header):
            reason = f"{len(cells)} values for {len(header)} columns"
            unread.append(UnreadText(number, reason, cut_text(line)))
        else:
            values = dict(zip(header, cells, strict=True))
            at_ns = _parse_csv_time(values.pop("timestamp", ""), t_ns, zone)
            samples.append(make_sample(values, COLUMNS, at_ns, {}))
    return SmiSamples(samples, failures, unread)


@cache
def _csv_time() -> re.Pattern[str]:
    return re.compile(r"(\d{4})/(\d\d)/(\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)", re.ASCII)


def _parse_csv_time(text: str, t_ns: int, zone: tzinfo) -> int:
    """Return the sample's own time, or the time of the query if it is invalid."""
    found = _csv_time().fullmatch(text)
    if not found:
        return t_ns
    try:
        return iso_ns("-".join(found.group(1, 2, 3)), found[4], None, LogClock(zone=zone))
    except UnplacedError:
        return t_ns
