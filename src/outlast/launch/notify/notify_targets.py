"""Targets of `--notify`: their syntax, and their secrets from the environment."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Literal, get_args
from urllib.parse import SplitResult, parse_qsl, urlencode

import msgspec

from outlast.errors import UsageError
from outlast.launch.notify.target_urls import (
    PORTS,
    VARIABLE,
    Placeholders,
    filled,
    refuse_open_secrets,
    split_url,
    variable_value,
)

Message = Literal["start", "incident", "recovery", "interrupted", "failure", "done"]
Template = Literal["webhook", "slack", "pagerduty"]
MESSAGES: tuple[Message, ...] = get_args(Message)
_PAGED: tuple[Message, ...] = ("failure", "done")
_KEY = "routing_key"


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
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


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
        _read_target(text, Placeholders())
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


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
        elif name == "bearer" and (variable := VARIABLE.fullmatch(value)):
            bearer = variable_value(variable[1], environment)
        elif name == "bearer":
            raise UsageError("bearer= takes env:NAME, the variable that has the token")
        else:
            raise UsageError(f"unknown option {name!r}: there are on= and bearer=")
    if variable := VARIABLE.fullmatch(address):
        url = split_url(variable_value(variable[1], environment), f"the value of {variable[1]}")
    else:
        url = split_url(address, f"a target of kind {template}")
        _refuse_open_secrets(url, template)
    path = "/".join(filled(part, environment) for part in url.path.split("/")) or "/"
    query = [
        (name, filled(value, environment, safe=None))
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
        port=url.port or PORTS[url.scheme],
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


def _refuse_open_secrets(url: SplitResult, template: Template) -> None:
    if template == "slack" and not VARIABLE.search(url.path):
        raise UsageError(
            "the URL of a Slack webhook is a secret, and each process of this host can read"
            " command lines: export it, and give slack+env:NAME"
        )
    refuse_open_secrets(url, _KEY)
