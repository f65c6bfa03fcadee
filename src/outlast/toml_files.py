"""TOML files of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outlast.errors import ConfigError

FILE_BYTES_MAX = 1_000_000


def read(path: Path, what: str, undone: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, which names the file and the field.

    `what`: the kind of file, as in "scenario"; `undone`: the consequence of a failure, as in
    "nothing was checked".
    """
    import tomllib  # few commands are given a file, and it takes milliseconds

    try:
        with path.open("rb") as file:  # a pipe has no size to ask for
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) <= FILE_BYTES_MAX:
            return tomllib.loads(data.decode())
        wrong, cause = f"larger than {FILE_BYTES_MAX:,} bytes; that is no {what}", None
    except OSError as error:
        wrong, cause = error.strerror or str(error), error
    except RecursionError as error:
        wrong, cause = f"nested too deeply; that is no {what}", error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        wrong, cause = str(error), error
    raise ConfigError(f"{path}: {wrong}" + (f"; {undone}" if undone else "")) from cause
