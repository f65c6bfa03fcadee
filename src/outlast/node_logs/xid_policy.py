"""Policy of XIDs: who loses the job, what remedies it, and which sources disagree.

The policy is data (`xid.toml` beside this file, with a version); a file of one's own may override
single entries of it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from outlast import toml_files
from outlast.errors import ConfigError
from outlast.log_records import Severity, Symptom

if TYPE_CHECKING:
    from pathlib import Path

Action = Literal[
    "restart-app",  # the program; the node is as it should be
    "reset-gpu",
    "reboot",
    "inspect",  # a person looks, or a diagnostic runs
    "replace",
    "contact",  # the vendor
    "update",  # driver or firmware
    "ignore",
    "workflow",  # the line's other words, or other lines beside it, decide
]
Source = Literal["nvidia", "gpud", "gcm", "k8s", "azure"]
SOURCES: tuple[Source, ...] = get_args(Source)
Kind = Literal["xid", "sxid"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CODE_DIGITS_MAX = 9

LEAVES = {"ignore", "pass", "restart_app", "warn", "warning"}
DEPENDS = ("check_", "workflow_", "xid_")  # such words say neither


class PolicyWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a line has these words, they decide over its code."""

    has: str
    severity: Severity
    action: Action


class PolicyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One code. `lines`: a table of `Policy.lines`; `says`: each source, in its own words."""

    name: str
    symptom: Symptom
    severity: Severity
    action: Action
    lines: str = ""
    says: dict[Source, str] = {}


class Judgement(NamedTuple):
    """What a code means on the line that it stood on."""

    name: str
    symptom: Symptom
    severity: Severity
    action: Action


class Disagreement(NamedTuple):
    """Sources that take the node out of service for a code, and those that leave it there."""

    takes: tuple[Source, ...]
    leaves: tuple[Source, ...]


UNKNOWN: dict[Kind, PolicyEntry] = {
    "xid": PolicyEntry(name="", symptom="other", severity="unknown", action="contact"),
    "sxid": PolicyEntry(
        name="", symptom="nvlink", severity="unknown", action="contact", lines="switch"
    ),
}


class XidPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`version` names who wrote it and when; a report says it."""

    version: str
    lines: dict[str, tuple[PolicyWords, ...]]
    xid: dict[int, PolicyEntry]
    sxid: dict[int, PolicyEntry]

    def entry(self, code: str) -> PolicyEntry | None:
        """Of a finding's code, as in XID 79 or SXID 20034; None where nothing is known of it."""
        kind, _, number = code.partition(" ")
        if kind.lower() not in KINDS or not number.isdecimal() or len(number) > CODE_DIGITS_MAX:
            return None
        return (self.xid if kind.lower() == "xid" else self.sxid).get(int(number))

    def judge(self, kind: Kind, code: int, text: str = "") -> Judgement:
        """`text`: the rest of the line. A code that is not known is of severity unknown."""
        entry = getattr(self, kind).get(code, UNKNOWN[kind])
        severity, action = entry.severity, entry.action
        lower = text.lower()
        for words in self.lines.get(entry.lines, ()):
            if words.has in lower:
                severity, action = words.severity, words.action
                break
        return Judgement(entry.name, entry.symptom, severity, action)

    def disagreements(self, code: int) -> Disagreement | None:
        """Of an XID; None where all sources that say something would do the same."""
        takes: list[Source] = []
        leaves: list[Source] = []
        for source, word in self.xid.get(code, UNKNOWN["xid"]).says.items():
            if not word.lower().startswith(DEPENDS):
                (leaves if word.lower() in LEAVES else takes).append(source)
        return Disagreement(tuple(takes), tuple(leaves)) if takes and leaves else None


def disagreements(code: int) -> Disagreement | None:
    """Of an XID in the policy that comes with the package."""
    return shipped_policy().disagreements(code)


@cache
def shipped_policy() -> XidPolicy:
    """The policy that comes with the package."""
    import tomllib  # only who meets a code waits for these
    from pathlib import Path

    found = tomllib.loads(Path(__file__).with_name("xid.toml").read_text("utf-8"))
    return _policy(found, "xid.toml")


def load_policy(path: Path) -> XidPolicy:
    """The shipped policy, with the entries of a file of the same form in place of its own. An
    entry for a code that is known may say less than all. Raises ConfigError, which names the
    entry."""
    base = msgspec.to_builtins(shipped_policy(), str_keys=True)
    mine = toml_files.read(path, "policy")
    for key, value in mine.items():
        if key not in base:
            raise ConfigError(f"{path}: {key} is not known; there are {', '.join(base)}")
        if key == "version":
            continue
        for name, entry in _table(value, f"{path}: {key}").items():
            if key == "lines":
                base[key][name] = entry
            else:
                told = _table(entry, f"{path}: {key}.{name}")
                base[key][name] = {**base[key].get(name, {}), **told}
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
