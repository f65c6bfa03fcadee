"""A file of rates that `outlast fleet fit` measured on a cluster: docs/fleet.md has the format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from outlast import toml_files
from outlast.errors import ConfigError
from outlast.plan.rates import MTBF_LEAST_S, MTBF_MOST_S, Failures

VERSION = 1
WEIGHT_LEAST, WEIGHT_MOST = 0.5, 1e6

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class Measured(NamedTuple):
    """`failures` goes where --failures would; `said`: other fields of a scenario by key."""

    failures: Failures
    said: dict[str, Any]


class _Failures(msgspec.Struct, frozen=True):
    per_gpu_second: Annotated[float, msgspec.Meta(ge=1 / MTBF_MOST_S, le=1 / MTBF_LEAST_S)]
    weight_failures: Annotated[float, msgspec.Meta(ge=WEIGHT_LEAST, le=WEIGHT_MOST)]
    source: _Text


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["outlast-rates"]
    version: int
    name: _Text
    failures: _Failures
    scenario: dict[str, Any] = {}
    measured: dict[str, Any] = {}  # this and what follows only people read
    causes: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


def measured(path: Path) -> Measured:
    """What a file of rates says of a cluster; tables that only people read are passed over. Raises
    ConfigError, which names the file and the field."""
    found = toml_files.read(path, "file of rates")
    try:
        told = msgspec.convert(found, _File)
    except msgspec.ValidationError as error:
        fault, _, where = str(error).partition(" - at `")
        field = where.strip("`$.")
        raise ConfigError(
            f"{path}: {field + ': ' if field else ''}{fault}; `outlast fleet fit LAKE --out FILE`"
            " writes such a file"
        ) from error
    if told.version != VERSION:
        raise ConfigError(
            f"{path}: version {told.version}; this Outlast reads version {VERSION}: measure again"
            " with `outlast fleet fit`"
        )
    rate = told.failures
    return Measured(
        Failures(
            name=told.name, per_gpu_s=rate.per_gpu_second, source=rate.source,
            weight_failures=rate.weight_failures,
        ),
        told.scenario,
    )  # fmt: skip
