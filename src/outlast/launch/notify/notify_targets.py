"""Targets of `--notify`: their syntax, and their secrets from the environment."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Literal, get_args
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urlsplit

import msgspec

from outlast.errors import UsageError
from outlast.launch.bundles.secret_redaction import is_secret_name

Message = Literal["start", "incident", "recovery", "interrupted", "failure", "done"]
Template = Literal["webhook", "slack", "pagerduty"]
MESSAGES: tuple[Message, ...] = get_args(Message)
_PAGED: tuple[Message, ...] = ("failure", "done")
_KEY = "routing_key"
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
_PORTS = {"http": 80, "https": 443}


class NotifyTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Server that gets messages, with its secrets: for memory alone, never for a file."""

    template: Template
    messages: tuple[Message, ...]
    scheme: str
    host: str
    port: int
    path: str  # with the query
    routing_key: str = ""
    bearer: str = ""

    @property
    def label(self) -> str:
        """Name of the target for people, without secrets."""
        return f"{self.template} at {self.host}"

    @property
    def authority(self) -> str:
        """Host as in a URL, with a port other than the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def add_notify_flag(add: Callable[..., object]) -> None:
    """Add `--notify` to the parser."""
    add(
        "--notify",
        type=_target_text,
        action="append",
        default=[],
        metavar="TARGET",
        help="Send messages about incidents and the end of the run to a webhook (https://...), to"
        " Slack (slack+env:NAME) or to PagerDuty"
        " (pagerduty+https://events.pagerduty.com/v2/enqueue?routing_key=env:NAME). env:NAME: the"
        " value of that variable. Options follow after spaces: on=failure,done, bearer=env:NAME."
        " Repeatable; see docs/notifications.md (default: none).",
    )


def _target_text(text: str) -> str:
    """Check all but the variables' values: the plan keeps the text, without secrets."""
    try:
        _read_target(text, _Placeholders())
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


class _Placeholders(dict[str, str]):
    """A value for each variable, with which a text can be checked before they are read."""

    def __missing__(self, name: str) -> str:
        return f"https://variable.invalid/?{_KEY}=x"


def read_target(text: str, environment: Mapping[str, str]) -> NotifyTarget:
    """Return the target of a `--notify`. Raises UsageError, which shows no secret."""
    try:
        return _read_target(text, environment)
    except UsageError as error:
        raise UsageError(f"--notify: {error}; nothing was started") from error


def _read_target(text: str, environment: Mapping[str, str]) -> NotifyTarget:
    words = text.split()
    if not words:
        raise UsageError("an empty target")
    template, address = _template_of(words[0])
    messages = _PAGED if template == "pagerduty" else MESSAGES
    bearer = ""
    for option in words[1:]:
        name, _, value = option.partition("=")
        if name == "on":
            messages = _messages(value)
        elif name == "bearer" and (variable := _VARIABLE.fullmatch(value)):
            bearer = _value(variable[1], environment)
        elif name == "bearer":
            raise UsageError("bearer= takes env:NAME, the variable that has the token")
        else:
            raise UsageError(f"unknown option {name!r}: there are on= and bearer=")
    if variable := _VARIABLE.fullmatch(address):
        url = _split(_value(variable[1], environment), f"the value of {variable[1]}")
    else:
        url = _split(address, f"a target of kind {template}")
        _refuse_open_secrets(url, template)
    path = "/".join(_filled(part, environment) for part in url.path.split("/")) or "/"
    query = [
        (name, _filled(value, environment, safe=None))
        for name, value in parse_qsl(url.query, keep_blank_values=True)
    ]
    key = ""
    if template == "pagerduty":
        key = dict(query).get(_KEY, "")
        if not key:
            raise UsageError(f"PagerDuty needs ?{_KEY}=env:NAME, the integration's key")
        query = [pair for pair in query if pair[0] != _KEY]
    return NotifyTarget(
        template=template,
        messages=messages,
        scheme=url.scheme,
        host=url.hostname or "",
        port=url.port or _PORTS[url.scheme],
        path=path + (f"?{urlencode(query)}" if query else ""),
        routing_key=key,
        bearer=bearer,
    )


def _template_of(word: str) -> tuple[Template, str]:
    for template in ("slack", "pagerduty"):
        if word.startswith(f"{template}+"):
            return template, word.removeprefix(f"{template}+")
    return "webhook", word


def _messages(text: str) -> tuple[Message, ...]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MESSAGES]:
        raise UsageError(f"on={unknown[0]}: the messages are {', '.join(MESSAGES)}")
    return tuple(message for message in MESSAGES if message in names)


def _split(address: str, subject: str) -> SplitResult:
    """Return the parts of a URL. The address is not shown: it may hold a secret."""
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError as error:
        raise UsageError(f"{subject} is no URL") from error
    if url.scheme not in _PORTS or not url.hostname or port == 0:
        raise UsageError(f"{subject} is no URL of a server, as in https://example.com/hook")
    if not address.isascii() or not address.isprintable() or " " in address:
        raise UsageError(f"{subject} has characters that must be written as %XX, or a host as xn--")
    if "@" in url.netloc:
        raise UsageError(f"{subject} has a user before its host: give bearer=env:NAME")
    if url.fragment:
        raise UsageError(f"{subject} has a fragment (#), which no server gets")
    return url


def _refuse_open_secrets(url: SplitResult, template: Template) -> None:
    if template == "slack" and not _VARIABLE.search(url.path):
        raise UsageError(
            "the URL of a Slack webhook is a secret, and each process of this host can read"
            " command lines: export it, and give slack+env:NAME"
        )
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if (name == _KEY or is_secret_name(name)) and not _VARIABLE.fullmatch(value):
            raise UsageError(
                f"{name} is a secret, and each process of this host can read command lines:"
                f" export it, and give {name}=env:NAME"
            )


def _filled(part: str, environment: Mapping[str, str], safe: str | None = "/") -> str:
    """Return a part of a URL, or the variable that it names; `safe`: quoted, but for these."""
    variable = _VARIABLE.fullmatch(part)
    if variable is None:
        return part
    value = _value(variable[1], environment)
    return value if safe is None else quote(value.strip("/"), safe=safe)


def _value(name: str, environment: Mapping[str, str]) -> str:
    try:
        value = environment[name].strip()
    except KeyError as error:
        raise UsageError(f"the variable {name} is not set") from error
    if not value or not value.isascii() or not value.isprintable():
        raise UsageError(f"the variable {name} is empty, or has characters that are not of a URL")
    return value
