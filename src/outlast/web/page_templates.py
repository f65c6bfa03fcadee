"""Templates and assets of all pages, and their Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

LATEST_S = 250_000_000_000  # in the year 9892
_STYLES = ("page.css", "planner.css", "lake/lake.css", "comparison/comparison.css")
_SCRIPTS = (
    "local_times.js",
    "live_parts.js",
    "page.js",
    "planner.js",
    "lake/lake.js",
    "comparison/comparison.js",
)


@cache
def asset(name: str) -> str:
    """Return a file of this package."""
    return files("outlast.web").joinpath(name).read_text(encoding="utf-8")


@cache
def content_policy() -> str:
    """Return the Content-Security-Policy: own style sheets, own scripts, own server."""
    styles, scripts = (" ".join(map(_hash, names)) for names in (_STYLES, _SCRIPTS))
    return (
        f"default-src 'none'; style-src {styles}; script-src {scripts};"
        " connect-src 'self'; base-uri 'none'; form-action 'self'"
    )


def _hash(name: str) -> str:
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@cache
def environment() -> Environment:
    """Return the environment of the templates, which escapes every value."""
    found = Environment(
        loader=PackageLoader("outlast.web", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    found.filters["date"] = _date
    return found


def _date(t_ns: float) -> Markup:
    """Format Unix nanoseconds as UTC; the page's script adds the reader's own time."""
    at = datetime.fromtimestamp(min(t_ns / 1e9, LATEST_S), UTC)
    iso, text = at.strftime("%Y-%m-%dT%H:%M:%SZ"), at.strftime("%a %d %b %Y, %H:%M UTC")
    return Markup('<time datetime="{}">{}</time>').format(iso, text)
