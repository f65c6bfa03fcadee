"""Redaction of secrets in texts and values: what a bundle leaves out.

Redacted are values of environment variables with a secret's name, values behind such a name in a
text or on a command line, and texts of a known shape (keys of clouds, tokens, passwords of URLs).
Numbers are never redacted: "tokens: 4096" is what language models log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
VALUE_LENGTH_MIN = 6  # shorter values are words of any text
_WORDS = (
    r"(?:secret|token|passwd|password|passphrase|api[_-]?key|access[_-]?key|private[_-]?key"
    r"|credentials?|auth[_-]?key|cookie)"
)
# Parts of the patterns below, without which none of them matches.
_HINTS = ("secret", "token", "passw", "passphrase", "key", "credential", "cookie")
_PREFIXES = (
    *("AKIA", "ASIA", "gho_", "ghp_", "ghu_", "ghs_", "ghr_", "github_pat_", "hf_", "sk-", "xox"),
    *("glpat-", "eyJ", "PRIVATE KEY", "hooks.slack.com/"),
)
_NAME = re.compile(rf"(?i)(?:^|[_\W]|\b)[\w-]*{_WORDS}(?:$|[_-]\w*)")
_FLAG = re.compile(r"--?[A-Za-z][\w-]*")
_BEHIND_NAME = re.compile(
    rf"(?i)(?P<name>\b[\w-]*{_WORDS}\b[\"']?\s*[=:]\s*[\"']?)(?P<value>[^\s\"',;&]+)"
)
_SHAPES = re.compile(
    r"\b(?:A[KS]IA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|hooks\.slack\.com/[\w/-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}")
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)[^\s/@:\"']{0,200}:[^\s/@\"']{1,200}@")
_NUMBER = re.compile(r"[-+]?[\d.,_]+(?:e[-+]?\d+)?[a-z%/]{0,4}", re.IGNORECASE)
_KNOWN_WORDS = ("true", "false", "none", "null", "default", "unknown")


def is_secret_name(name: str) -> bool:
    """Return whether a variable or a flag of this name holds a secret; `max_tokens` does not."""
    return bool(_NAME.search(name))


class SecretRedaction:
    """Redaction for one environment. `count`: values that were redacted so far."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        values = {value for name, value in environment.items() if is_secret_name(name)}
        long = [
            value
            for value in values
            if len(value) >= VALUE_LENGTH_MIN
            and value.lower() not in _KNOWN_WORDS
            and not _NUMBER.fullmatch(value)
        ]
        long.sort(key=len, reverse=True)  # a value may be a part of another one
        self._values = re.compile("|".join(map(re.escape, long))) if long else None
        self.count = 0

    def text(self, text: str) -> str:
        """Return a text without secrets. What cannot be in it is not looked for: logs are long."""
        if self._values:
            text = self._values.sub(self._whole, text)
        if any(prefix in text for prefix in _PREFIXES):
            text = _SHAPES.sub(self._whole, text)
        if "://" in text:
            text = _URL.sub(self._in_url, text)
        lowered = text.lower()
        if "bearer" in lowered or "basic" in lowered:
            text = _BEARER.sub(self._behind, text)
        if not any(word in lowered for word in _HINTS):
            return text
        lines = text.splitlines(keepends=True)
        return "".join(
            _BEHIND_NAME.sub(self._named, line)
            if any(word in line.lower() for word in _HINTS)
            else line
            for line in lines
        )

    def data(self, data: bytes) -> bytes:
        """Return bytes of a log without secrets; other bytes, of any encoding, stay."""
        return self.text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """Return a value of JSON without secrets in its texts."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._entry(str(key), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return self._arguments(list(value))
        return value

    def _entry(self, name: str, item: Any) -> Any:
        is_open = not isinstance(item, str) or not item or _NUMBER.fullmatch(item)
        if is_open or not is_secret_name(name):
            return self.value(item)
        self.count += 1
        return REDACTED

    def _arguments(self, items: list[Any]) -> list[Any]:
        """Redact the argument behind a flag such as `--api-key` as well."""
        found: list[Any] = []
        for before, item in zip([None, *items], items, strict=False):
            flag = before if isinstance(before, str) and _FLAG.fullmatch(before) else ""
            if is_secret_name(flag) and isinstance(item, str) and not item.startswith("-"):
                self.count += 1
                found.append(REDACTED)
            else:
                found.append(self.value(item))
        return found

    def _whole(self, _: re.Match[str]) -> str:
        self.count += 1
        return REDACTED

    def _behind(self, match: re.Match[str]) -> str:
        self.count += 1
        return match[1] + REDACTED

    def _in_url(self, match: re.Match[str]) -> str:
        self.count += 1
        return f"{match[1]}{REDACTED}@"

    def _named(self, match: re.Match[str]) -> str:
        value = match["value"]
        if _NUMBER.fullmatch(value) or value.lower() in _KNOWN_WORDS or value == REDACTED:
            return match[0]
        self.count += 1
        return match["name"] + REDACTED
