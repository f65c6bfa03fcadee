"""The flags that several commands have, each said once; a command's docstring has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

File = Annotated[Path | None, Parameter(help="A scenario in TOML.")]
Fields = Annotated[
    str,
    Parameter(
        help="The scenario, as in --gpus 16384 --cost 30s; `outlast plan fields` lists all.",
        allow_leading_hyphen=True,  # `--cost -5s` is refused by name
    ),
]
Json = Annotated[bool, Parameter(help="One JSON object instead of words.")]
Seed = Annotated[
    int, Parameter(help="The same seed gives the same runs, wherever they are simulated.")
]
Workers = Annotated[
    int | None, Parameter(help="Processes; where it is a matter of seconds 1, else one a core.")
]
Dask = Annotated[
    str | None,
    Parameter(
        help="Address of a Dask scheduler, as in tcp://10.0.0.1:8786, whose workers have this"
        " Outlast."
    ),
]
