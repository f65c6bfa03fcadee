"""Sphinx's configuration: `make docs` builds the site strictly and needs no network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from command_pages import write_command_pages  # noqa: E402 - found by the path above

from outlast import __version__  # noqa: E402

project = "Outlast"
author = "The Outlast developers"
copyright = "The Outlast developers"  # noqa: A001 - Sphinx's own name for it
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Outlast {release}"
html_copy_source = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

# Docstrings have code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


def read_sections(_: Sphinx, what: str, name: str, obj: Any, __: Any, lines: list[str]) -> None:
    """Turn `Args:`, `Returns:` and `Raises:` into reStructuredText.

    Napoleon's own hook is not used: it takes a colon in a property's first line for a type.
    """
    if what not in {"attribute", "data", "property"}:
        lines[:] = GoogleDocstring(list(lines), what=what, name=name, obj=obj).lines()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_sections)
    write_command_pages(HERE / "reference" / "commands")
