"""The launcher reads torchrun's command line by torch's own parser, without importing torch."""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.launch.torch_definitions import TorchDefinitions

RUN, LOGS = "torch.distributed.run", "torch.distributed.elastic.multiprocessing.api"


def flags(parser: ArgumentParser) -> list[dict[str, Any]]:
    """Return everything that argparse knows of each argument; functions by their names."""
    return [
        {
            name: getattr(value, "__name__", value)
            for name, value in vars(action).items()
            if name != "container"
        }
        | {"action": type(action).__name__}
        for action in parser._actions
    ]


def test_the_parser_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    run = pytest.importorskip(RUN)
    monkeypatch.setenv("PET_ROLE", "trainer")
    monkeypatch.setenv("PET_STANDALONE", "1")
    ours, theirs = TorchDefinitions().get(RUN, "get_args_parser")(), run.get_args_parser()
    assert ours is not theirs and flags(ours) == flags(theirs)
    argv = ["--nproc_per_node=3", "-r", "1:2", "--duplicate-stdout-filters", "a,,b", "x.py", "-m"]
    assert ours.parse_args(argv) == theirs.parse_args(argv)


def streams(definitions: Any, text: str) -> object:
    """Return the streams of three ranks, or the error's text."""
    try:
        return definitions.to_map(definitions.Std.from_str(text), 3)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("text", ["0", "3", "0:1,1:2", "1:3", "4", "0:4", ""])
def test_streams_are_read_as_by_torchrun(text: str) -> None:
    theirs, torch = pytest.importorskip(LOGS), TorchDefinitions()
    ours = SimpleNamespace(Std=torch.get(LOGS, "Std"), to_map=torch.get(LOGS, "to_map"))
    assert ours.Std is not theirs.Std
    assert streams(ours, text) == streams(theirs, text)


def test_what_needs_torch_is_imported_from_it() -> None:
    run = pytest.importorskip(RUN)
    found = TorchDefinitions().get(RUN, "determine_local_world_size")
    assert found is run.determine_local_world_size


def test_a_launcher_does_not_import_torch(tmp_path: Path) -> None:
    """Its template does."""
    pytest.importorskip("torch")
    (tmp_path / "train.py").touch()
    code = """
import sys
import outlast.cli.main, outlast.cli.run
from outlast.launch.torchrun_arguments import parse
parse(["--nproc-per-node", "2", "--tee", "0:3", "--role", "x", sys.argv[1]])
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "train.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
