"""Names in the source of loaded modules that may keep a rank's place in a mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from outlast.worker.script.coordinate_readers import find_coordinate_reader


def module(folder: Path, name: str, source: str) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = str(folder / f"{name}.py")
    Path(made.__file__).write_text(source)
    return made


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, ModuleType]:
    """A script without such a name, torch and its requirements."""
    script = module(tmp_path, "train", "mesh = init_device_mesh(kind, (2, 2))\nmesh.get_group(0)\n")
    libraries = ("torch", "numpy", "sympy", "msgspec", "logging")
    loaded = {name: each for name, each in sys.modules.items() if name.startswith(libraries)}
    return {**loaded, "__main__": script}


@pytest.mark.parametrize(
    "code",
    [
        "mesh.get_coordinate()",
        "dist.get_process_group_ranks(group)",
        "info.shard_mesh_rank",
        "mesh._rank",
        "distribute_tensor(x, mesh, placements)",
    ],
)
def test_a_name_in_a_module_beside_the_script_is_found(
    tmp_path: Path, modules: dict[str, ModuleType], code: str
) -> None:
    assert find_coordinate_reader(modules) == ""
    modules["beside"] = module(tmp_path, "beside", f"def place():\n    return {code}\n")
    assert find_coordinate_reader(modules).startswith(f"{tmp_path / 'beside.py'}:2 (")


def test_a_module_without_a_source_may_have_any_name(modules: dict[str, ModuleType]) -> None:
    modules["beside"] = ModuleType("beside")
    modules["beside"].__file__ = "/packages/beside.pyc"
    assert find_coordinate_reader(modules) == "/packages/beside.pyc, which has no source,"


def test_a_script_without_a_file_may_have_any_name(modules: dict[str, ModuleType]) -> None:
    modules["__main__"].__file__ = None
    assert find_coordinate_reader(modules) == "a script without a file"
