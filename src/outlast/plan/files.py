"""TOML files that a user hands over."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError

FILE_BYTES_MAX = 1_000_000


def toml_of(path: Path, what: str) -> dict[str, Any]:
    """What a file holds; `what` it should be, as in "scenario". Raises ConfigError, which names the
    file."""
    try:
        with path.open("rb") as file:  # a pipe has no size to ask for
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes; that is no {what}")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply; that is no {what}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: {error}") from error
