"""Errors of NVIDIA's driver, switches and fabric manager: log lines and XID policy.

The policy is data (`xid.toml` in this folder, with a version); a site's file may override single
entries.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from outlast.config import read_toml
from outlast.errors import ConfigError
from outlast.log_records import Severity, Symptom
from outlast.node_logs.log_envelopes import FABRIC
from outlast.node_logs.log_readings import device_address

if TYPE_CHECKING:
    from pathlib import Path

Action = Literal[
    "restart-app",  # restart the program; the node is healthy
    "reset-gpu",
    "reboot",
    "inspect",  # manually or by a diagnostic
    "replace",
    "contact",  # the vendor
    "update",  # driver or firmware
    "ignore",
    "workflow",  # depends on other words of the line, or on other lines
]
Source = Literal["nvidia", "gpud", "gcm", "k8s", "azure"]
Kind = Literal["xid", "sxid"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CODE_DIGITS_MAX = 9

LEAVES = {"ignore", "pass", "restart_app", "warn", "warning"}
DEPENDS = ("check_", "workflow_", "xid_")  # prefixes of conditional recommendations


class PolicyWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words in a line that override the severity and remedy of its code."""

    has: str
    severity: Severity
    action: Action


class PolicyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Entry of one code.

    `lines`: a table of `XidPolicy.lines`; `says`: each source's recommendation, verbatim.
    """

    name: str
    symptom: Symptom
    severity: Severity
    action: Action
    lines: str = ""
    says: dict[Source, str] = {}


class Judgement(NamedTuple):
    """Meaning of a code on a given line."""

    name: str
    symptom: Symptom
    severity: Severity
    action: Action


class Disagreement(NamedTuple):
    """Sources that take the node out of service for a code (`takes`), and other sources."""

    takes: tuple[Source, ...]
    leaves: tuple[Source, ...]


UNKNOWN: dict[Kind, PolicyEntry] = {
    "xid": PolicyEntry(name="", symptom="other", severity="unknown", action="contact"),
    "sxid": PolicyEntry(
        name="", symptom="nvlink", severity="unknown", action="contact", lines="switch"
    ),
}


class XidPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy of XIDs and SXIDs. `version`: author and date, printed in reports."""

    version: str
    lines: dict[str, tuple[PolicyWords, ...]]
    xid: dict[int, PolicyEntry]
    sxid: dict[int, PolicyEntry]

    def entry(self, code: str) -> PolicyEntry | None:
        """Return the entry of a code such as XID 79 or SXID 20034; None if it is unknown."""
        kind, _, number = code.partition(" ")
        if kind.lower() not in KINDS or not number.isdecimal() or len(number) > CODE_DIGITS_MAX:
            return None
        return (self.xid if kind.lower() == "xid" else self.sxid).get(int(number))

    def judge(self, kind: Kind, code: int, text: str = "") -> Judgement:
        """Judge a code with the rest of its line, `text`; an unknown code has severity unknown."""
        entry = getattr(self, kind).get(code, UNKNOWN[kind])
        severity = entry.severity
        action = entry.action
        lower = text.lower()
        for words in self.lines.get(entry.lines, ()):
            if words.has in lower:
                severity = words.severity
                action = words.action
                break
        return Judgement(entry.name, entry.symptom, severity, action)

    def disagreements(self, code: int) -> Disagreement | None:
        """Return the disagreement about an XID; None if all sources that cover it agree."""
        takes: list[Source] = []
        leaves: list[Source] = []
        for source, word in self.xid.get(code, UNKNOWN["xid"]).says.items():
            if not word.lower().startswith(DEPENDS):
                (leaves if word.lower() in LEAVES else takes).append(source)
        return Disagreement(tuple(takes), tuple(leaves)) if takes and leaves else None


def disagreements(code: int) -> Disagreement | None:
    """Return the disagreement about an XID in the shipped policy."""
    return shipped_policy().disagreements(code)


@cache
def shipped_policy() -> XidPolicy:
    """Return the policy shipped with the package."""
    import tomllib  # lazy: for start-up time
    from pathlib import Path

    found = tomllib.loads(Path(__file__).with_name("xid.toml").read_text("utf-8"))
    return _policy(found, "xid.toml")


def load_policy(path: Path) -> XidPolicy:
    """Return the shipped policy with the entries of a site's file.

    An entry for a known code may be partial. Raises ConfigError with the entry's name.
    """
    base = msgspec.to_builtins(shipped_policy(), str_keys=True)
    mine = read_toml(path, "policy")
    for key, value in mine.items():
        if key not in base:
            raise ConfigError(f"{path}: {key} is not known; there are {', '.join(base)}")
        if key == "version":
            continue
        for name, entry in _table(value, f"{path}: {key}").items():
            if key == "lines":
                base[key][name] = entry
            else:
                fields = _table(entry, f"{path}: {key}.{name}")
                base[key][name] = {**base[key].get(name, {}), **fields}
    version = mine.get("version", path.name)
    if not isinstance(version, str):
        raise ConfigError(f'{path}: version must be a text, as in "{base["version"]}"')
    base["version"] = f"{version} over {base['version']}"
    return _policy(base, str(path))


def _table(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f'{where} must be a table, as in 79 = {{ severity = "now" }}')
    return value


def _policy(found: dict[str, Any], where: str) -> XidPolicy:
    lines = {
        name: _convert(value, tuple[PolicyWords, ...], f"{where}: lines.{name}")
        for name, value in found["lines"].items()
    }
    codes: dict[Kind, dict[int, PolicyEntry]] = {"xid": {}, "sxid": {}}
    for kind in KINDS:
        for name, value in found[kind].items():
            at = f"{where}: {kind}.{name}"
            if not (name.isascii() and name.isdecimal() and len(name) <= CODE_DIGITS_MAX):
                raise ConfigError(f"{at}: a code is a number, as in 79")
            entry = _convert(value, PolicyEntry, at)
            if entry.lines and entry.lines not in lines:
                raise ConfigError(
                    f"{at}: there is no lines.{entry.lines}; there are {', '.join(lines)}"
                )
            codes[kind][int(name)] = entry
    return XidPolicy(version=found["version"], lines=lines, **codes)


def _convert(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        choices = {"severity": Severity, "action": Action, "symptom": Symptom}
        named = next((key for key in choices if f"$.{key}`" in str(error)), "")
        one_of = f"; there are {', '.join(get_args(choices[named]))}" if named else ""
        raise ConfigError(f"{where}: {error}{one_of}") from error


class LineFinding(NamedTuple):
    """Finding of a line, without its time."""

    check: str
    symptom: Symptom
    severity: Severity
    code: str
    device: str
    detail: str


class NoCodeError(Exception):
    """XID line without a code."""


# NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.
# nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
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
DRIVER_ERRORS: dict[str, Symptom] = {LOST: "gpu-unavailable", GSP: "gpu-driver"}
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

    `policy`: None is the shipped policy, loaded when a code occurs. Raises NoCodeError.
    """
    if "SXid" in message:
        return _code_finding("sxid", SXID, message, policy)
    if "NVRM: Xid" in message:
        return _code_finding("xid", XID, message, policy)
    if _compiled(NO_START).search(message):
        where = _compiled(NO_START_OF).search(message)
        device = device_address(where["dev"]) if where else ""
        return LineFinding("kernel.nvrm", "gpu-unavailable", "now", "", device, message)
    for pattern, symptom in DRIVER_ERRORS.items():
        if found := _compiled(pattern).search(message):
            device = device_address(found["dev"])
            return LineFinding("kernel.nvrm", symptom, "now", "", device, message)
    return None


def _code_finding(kind: Kind, pattern: str, message: str, policy: XidPolicy | None) -> LineFinding:
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

    An error of another component than a switch has severity unknown: the line does not show whether
    the fabric works.
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
