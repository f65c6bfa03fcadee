"""URLs of servers on a command line, and their secrets from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from outlast.errors import UsageError
from outlast.launch.bundles.secret_redaction import is_secret_name

VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
PORTS = {"http": 80, "https": 443}


class Placeholders(dict[str, str]):
    """A value for each variable, with which a text can be checked before they are read."""

    def __missing__(self, name: str) -> str:
        return "https://variable.invalid/?routing_key=x"


def split_url(address: str, subject: str) -> SplitResult:
    """Return the parts of a URL. The address is not shown: it may hold a secret."""
    try:
        url = urlsplit(address)
        port = url.port
    except ValueError as error:
        raise UsageError(f"{subject} is no URL") from error
    if url.scheme not in PORTS or not url.hostname or port == 0:
        raise UsageError(f"{subject} is no URL of a server, as in https://example.com/hook")
    if not address.isascii() or not address.isprintable() or " " in address:
        raise UsageError(f"{subject} has characters that must be written as %XX, or a host as xn--")
    if "@" in url.netloc:
        raise UsageError(f"{subject} has a user before its host: give bearer=env:NAME")
    if url.fragment:
        raise UsageError(f"{subject} has a fragment (#), which no server gets")
    return url


def refuse_open_secrets(url: SplitResult, *names: str) -> None:
    """Raise UsageError where a parameter with one of the names, or with a secret's, is written
    out."""
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if (name in names or is_secret_name(name)) and not VARIABLE.fullmatch(value):
            raise UsageError(
                f"{name} is a secret, and each process of this host can read command lines:"
                f" export it, and give {name}=env:NAME"
            )


def filled(part: str, environment: Mapping[str, str], safe: str | None = "/") -> str:
    """Return a part of a URL, or the variable that it names; `safe`: quoted, but for these."""
    variable = VARIABLE.fullmatch(part)
    if variable is None:
        return part
    value = variable_value(variable[1], environment)
    return value if safe is None else quote(value.strip("/"), safe=safe)


def variable_value(name: str, environment: Mapping[str, str]) -> str:
    """Return the value of a variable. Raises UsageError, which does not show it."""
    try:
        value = environment[name].strip()
    except KeyError as error:
        raise UsageError(f"the variable {name} is not set") from error
    if not value or not value.isascii() or not value.isprintable():
        raise UsageError(f"the variable {name} is empty, or has characters that are not of a URL")
    return value
