"""`nvidia-smi -q -x`: the XML, flattened. Nothing in it is expanded or fetched."""

from __future__ import annotations

import re
from datetime import UTC, tzinfo
from functools import cache
from typing import TYPE_CHECKING

from outlast.symptoms.gpu_samples import GpuSample
from outlast.symptoms.smi_fields import ECC_FIELDS, PATHS, sample
from outlast.symptoms.stamps import UnplacedError, at, month
from outlast.symptoms.unread import Unread, cut

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

DEPTH_MAX = 64
ROOT = "<nvidia_smi_log"
END = "</nvidia_smi_log>"


def xml_samples(text: str, t_ns: int, zone: tzinfo = UTC) -> tuple[list[GpuSample], list[Unread]]:
    """A sample for each GPU; a text that declares entities is refused whole."""
    from xml.etree import ElementTree  # only who has XML waits for it

    if "<!ENTITY" in text:
        return [], [Unread(0, "it declares entities, which nvidia-smi never does", cut(text[:500]))]
    begin, end = text.find(ROOT), text.rfind(END)
    if end < begin:
        return [], [Unread(0, "cut off: the end of the XML is missing", cut(text[-500:]))]
    try:
        # no entity is declared, so that nothing can be expanded
        root = ElementTree.fromstring(text[begin : end + len(END)])  # noqa: S314
    except (ElementTree.ParseError, ValueError) as error:
        return [], [Unread(0, f"no XML: {error}", cut(text[begin : begin + 500]))]
    at_ns = _time(root.findtext("timestamp", ""), t_ns, zone)
    driver = {"driver": root.findtext("driver_version", "")}
    samples = [_gpu(number, gpu, at_ns, driver) for number, gpu in enumerate(root.findall("gpu"))]
    unread = []
    attached = root.findtext("attached_gpus", "").strip()
    if attached.isdecimal() and len(attached) < 5 and int(attached) != len(samples):
        unread = [Unread(0, f"{attached} GPUs are attached, {len(samples)} are in the XML", "")]
    return samples, unread


def _gpu(number: int, gpu: Element, t_ns: int, driver: dict[str, str]) -> GpuSample:
    said = dict(_flat(gpu))
    said.setdefault("pci/pci_bus_id", gpu.get("id", ""))
    fields = dict(PATHS)
    for field, text in zip(ECC_FIELDS, _errors(said), strict=True):
        if text is not None:
            said[field] = text
            fields[field] = field
    kept = {name: text for name, text in said.items() if name in fields}
    return sample(kept, fields, t_ns, {"index": number, **driver})


def _flat(gpu: Element) -> list[tuple[str, str]]:
    """Leaves by their path; of several with one path (processes) the last."""
    found: list[tuple[str, str]] = []
    stack: list[tuple[str, Element, int]] = [(child.tag, child, 1) for child in gpu]
    while stack:
        path, element, depth = stack.pop()
        if len(element) and depth < DEPTH_MAX:
            stack += [(f"{path}/{child.tag}", child, depth + 1) for child in element]
        elif not len(element):
            found.append((path, (element.text or "").strip()))
    return found


def _errors(said: dict[str, str]) -> list[str | None]:
    """Memory errors in the order of ECC_FIELDS: the total, or the sum over the kinds of memory,
    whatever this version calls them. None where it says nothing of them."""
    found: list[str | None] = []
    for period in ("volatile", "aggregate"):
        for word, bits in (("correctable", "single_bit"), ("uncorrectable", "double_bit")):
            start = f"ecc_errors/{period}/"
            total = said.get(f"{start}{bits}/total")
            parts = [
                text
                for name, text in said.items()
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
            at((int(found[4]), month(found[1]), int(found[2])), found[3], zone) if found else t_ns
        )
    except UnplacedError:
        return t_ns
