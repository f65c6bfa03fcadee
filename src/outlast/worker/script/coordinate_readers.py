"""Code that may keep what a device mesh has for one rank, found by the names in its source.

A process group sees who asks for the rank. A mesh answers `get_coordinate()`, and torch the ranks
of a group, from what they have stored. Code outside of torch that has such a name may keep the
answer, or make tensors that differ by rank.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

_NAMES = re.compile(
    rb"\b(?:get_coordinate|_coordinate_on_dim|_sym_get_coordinate|_dim_group_names"
    rb"|\w+_mesh_rank|_get_all_submeshes|compute_local_shape_and_global_offset"
    rb"|get_process_group_ranks|get_global_rank|get_group_rank|pg_group_ranks"
    rb"|distribute_tensor|distribute_module|redistribute|from_local|local_map|_StridedShard"
    rb"|Shard)\b|mesh\w*\._rank\b"
)
# Distributions that torch itself needs, and Outlast's.
_WITHOUT = frozenset(
    {"torch", "torchgen", "functorch", "outlast", "numpy", "sympy", "mpmath", "networkx", "jinja2"}
    | {"markupsafe", "filelock", "fsspec", "typing_extensions", "msgspec", "xxhash", "setuptools"}
)


def find_coordinate_reader(modules: Mapping[str, ModuleType] = sys.modules) -> str:
    """Return "FILE:LINE (NAME)" of a loaded module outside of torch that has one of the names; ""
    if none has. A script without a file, and modules without a source, may have any."""
    if getattr(modules["__main__"], "__file__", None) is None:
        return "a script without a file"
    library = sysconfig.get_paths()["stdlib"] + "/"
    for name, module in tuple(modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith((".py", ".pyc")) or name.partition(".")[0] in _WITHOUT:
            continue
        if file.startswith(library) and "-packages/" not in file:
            continue
        if place := _place_in(Path(file)):
            return place
    return ""


def _place_in(file: Path) -> str:
    if file.suffix == ".pyc":
        return f"{file}, which has no source,"
    try:
        source = file.read_bytes()
    except OSError:
        return f"{file}, which cannot be read,"
    found = _NAMES.search(source)
    if found is None:
        return ""
    line = source.count(b"\n", 0, found.start()) + 1
    return f"{file}:{line} ({found[0].decode()})"
