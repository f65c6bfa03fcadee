"""Target of `--otlp`: its syntax, and its secrets from the environment."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping

import msgspec

from outlast.errors import UsageError
from outlast.launch.notify.target_urls import VARIABLE, Placeholders, split_url, variable_value

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_SIGNALS = ("/v1/metrics", "/v1/traces")


class OtlpTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Receiver of OTLP over HTTP, with its secrets: for memory alone, never for a file."""

    url: str  # without the signal's path
    host: str
    headers: dict[str, str]

    @property
    def metrics_url(self) -> str:
        """URL of the metrics."""
        return self.url + _SIGNALS[0]

    @property
    def traces_url(self) -> str:
        """URL of the spans."""
        return self.url + _SIGNALS[1]


def add_otlp_flag(add: Callable[..., object]) -> None:
    """Add `--otlp` to the parser."""
    add(
        "--otlp",
        type=_target_text,
        default=None,
        metavar="TARGET",
        help="Send metrics of the run every 10 seconds, and incidents as spans, to an OpenTelemetry"
        " receiver (OTLP over HTTP, as in http://localhost:4318). Options follow after spaces:"
        " bearer=env:NAME, header=NAME=env:NAME. env:NAME: the value of that variable. See"
        " docs/metrics.md (default: none).",
    )


def _target_text(text: str) -> str:
    """Check all but the variables' values: the plan keeps the text, without secrets."""
    try:
        _read(text, Placeholders())
    except UsageError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def read_otlp_target(text: str, environment: Mapping[str, str]) -> OtlpTarget:
    """Return the target of `--otlp`. Raises UsageError, which shows no secret."""
    try:
        return _read(text, environment)
    except UsageError as error:
        raise UsageError(f"--otlp: {error}; nothing was started") from error


def _read(text: str, environment: Mapping[str, str]) -> OtlpTarget:
    words = text.split()
    if not words:
        raise UsageError("an empty target")
    address, subject = words[0], "the target"
    if variable := VARIABLE.fullmatch(address):
        address = variable_value(variable[1], environment)
        subject = f"the value of {variable[1]}"
    url = split_url(address, subject)
    if url.query:
        raise UsageError("the target has a query (?), which would stand before the signal's path")
    base = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"
    if base.endswith(_SIGNALS):
        raise UsageError(f"leave {' and '.join(_SIGNALS)} out: both are added")
    headers: dict[str, str] = {}
    for option in words[1:]:
        name, value = _header(option)
        if name.lower() in map(str.lower, headers):
            raise UsageError(f"the header {name} is given twice")
        variable = VARIABLE.fullmatch(value)
        if variable is None:
            raise UsageError(
                f"the value of {name} may be a secret, and each process of this host can read"
                f" command lines: export it, and give env:NAME"
            )
        headers[name] = variable_value(variable[1], environment)
        if option.startswith("bearer="):
            headers[name] = f"Bearer {headers[name]}"
    return OtlpTarget(url=base, host=url.hostname or "", headers=headers)


def _header(option: str) -> tuple[str, str]:
    """Return the name of a header, and the text of its value."""
    kind, _, rest = option.partition("=")
    if kind == "bearer":
        return "Authorization", rest
    if kind != "header":
        raise UsageError(f"unknown option {kind!r}: there are bearer= and header=")
    name, _, value = rest.partition("=")
    if not _HEADER.fullmatch(name):
        raise UsageError("header= takes NAME=env:NAME, the header and the variable that has it")
    return name, value
