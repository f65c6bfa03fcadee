"""Lines of NVIDIA's driver, switches and fabric manager.

NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from outlast.log_records import Severity, Symptom
from outlast.node_logs.log_envelopes import FABRIC
from outlast.node_logs.log_readings import device_address
from outlast.node_logs.xid_policy import Kind, XidPolicy, shipped_policy


class LineFinding(NamedTuple):
    """Finding of a line, without its time."""

    check: str
    symptom: Symptom
    severity: Severity
    code: str
    device: str
    detail: str


class NoCodeError(Exception):
    """A line begins like an XID line and has no code."""


WORDS = ("NVRM: ", "SXid", "RmInitAdapter", "rm_init_adapter")
_PID = r"(?:, *pid=(?P<pid>[^,\s]*))?(?:, *name=(?P<name>[^,]*))?"
_AT = r" *(?:\((?P<dev>[^()]*)\))? *: *(?P<code>\d{1,9})(?!\w)"
XID = "NVRM: Xid" + _AT + _PID + r",? ?(?P<rest>.*)"
SXID = "SXid" + _AT + r",? ?(?P<rest>.*)"
UUID = r"NVRM: GPU at (?P<dev>PCI:[0-9a-fA-F:.]+): (?P<uuid>GPU-[0-9a-fA-F-]+)"
LOST = r"NVRM: GPU(?: at)? (?P<dev>[0-9a-fA-FPCI:.]+): .*fallen off the bus"
NO_START = r"(?:RmInitAdapter failed|rm_init_adapter failed)"
NO_START_OF = r"NVRM: GPU(?: at)? (?P<dev>(?:PCI:)?[0-9a-fA-F]+:[0-9a-fA-F:.]+\w)"
GSP = r"NVRM: Rate limiting GSP RPC error prints for GPU at (?P<dev>PCI:[0-9a-fA-F:.]+)"
SWITCH = (
    r"detected NVSwitch (?P<fatal>non-fatal|fatal) error (?P<code>\d{1,9})\b"
    r"(?:.*?pci bus id (?P<dev>[0-9a-fA-F:.]+))?"
)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII)


def uuid_of(message: str) -> tuple[str, str] | None:
    """Return the device and its UUID, if a line maps one to the other."""
    if "GPU-" not in message:
        return None
    found = _compiled(UUID).search(message)
    return (device_address(found["dev"]), found["uuid"]) if found else None


def parse_kernel_message(message: str, policy: XidPolicy | None) -> LineFinding | None:
    """Return the finding of a kernel message; None for an ordinary one.

    `policy`: None takes the shipped one, loaded when a code occurs. Raises NoCodeError.
    """
    if "SXid" in message:
        return _coded("sxid", SXID, message, policy)
    if "NVRM: Xid" in message:
        return _coded("xid", XID, message, policy)
    if _compiled(NO_START).search(message):
        where = _compiled(NO_START_OF).search(message)
        at = device_address(where["dev"]) if where else ""
        return LineFinding("kernel.nvrm", "gpu-unavailable", "now", "", at, message)
    found = _compiled(LOST).search(message)
    if found:
        return LineFinding(
            "kernel.nvrm", "gpu-unavailable", "now", "", device_address(found["dev"]), message
        )
    found = _compiled(GSP).search(message)
    if found:
        return LineFinding(
            "kernel.nvrm", "gpu-driver", "now", "", device_address(found["dev"]), message
        )
    return None


def _coded(kind: Kind, pattern: str, message: str, policy: XidPolicy | None) -> LineFinding:
    found = _compiled(pattern).search(message)
    name = kind.upper()
    if not found:
        raise NoCodeError(f"{name} without a number")
    rest = found["rest"].strip()
    judged = (policy or shipped_policy()).judge(kind, int(found["code"]), rest)
    groups = found.groupdict()
    process = ", ".join(
        f"{key} {groups[key].strip()}"
        for key in ("pid", "name")
        if groups.get(key) and "<unknown>" not in groups[key]
    )
    detail = rest or judged.name
    return LineFinding(
        f"kernel.{kind}",
        judged.symptom,
        judged.severity,
        f"{name} {int(found['code'])}",
        device_address(found["dev"] or ""),
        f"{detail} ({process})" if process else detail,
    )


def parse_fabric_message(message: str, level: str, policy: XidPolicy | None) -> LineFinding | None:
    """Return the finding of a fabric manager message; None for an ordinary one.

    An error that is not a switch's has severity unknown: the line does not show whether the fabric
    works.
    """
    found = _compiled(SWITCH).search(message)
    if found:
        judged = (policy or shipped_policy()).judge("sxid", int(found["code"]), found["fatal"])
        return LineFinding(
            FABRIC,
            judged.symptom,
            judged.severity,
            f"SXID {int(found['code'])}",
            device_address(found["dev"] or ""),
            message,
        )
    if level in {"ERROR", "CRITICAL", "FATAL"}:
        return LineFinding(FABRIC, "nvlink", "unknown", "", "", message)
    return None
