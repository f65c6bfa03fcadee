"""Loads of any layout into any other one, and equal parts written by replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.checkpoint.load.layout_ranks import WORLD, stages

from outlast.checkpoint.format.manifests import SavePoint
from outlast.checkpoint.load.checkpoint_reader import CheckpointReader
from outlast.checkpoint.save.save_engine import SaveEngine
from outlast.checkpoint.stores.catalog import open_checkpoint
from outlast.checkpoint.stores.folder_store import Folder

pytestmark = pytest.mark.process
DEADLINE_S = 120.0
REPOSITORY = Path(__file__).parents[3]
LAYOUTS = (
    "alone",
    "ddp",
    "fsdp4",
    "fsdp4 by columns",
    "fsdp2",
    "hsdp",
    "tp4",
    "fsdp+tp",
    "by hand",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where four processes have saved the model in every layout."""
    root = tmp_path_factory.mktemp("reshape")
    command = [sys.executable, "-m", "tests.checkpoint.load.layout_ranks", str(root)]
    done = subprocess.run(
        command, cwd=REPOSITORY, timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return root


@pytest.fixture(scope="module")
def wrong(root: Path) -> dict[str, str]:
    """What went wrong, by case, on the first rank where it did."""
    found: dict[str, str] = {}
    for rank in range(WORLD):
        for case, trace in json.loads((root / f"{rank}.json").read_text(encoding="utf-8")).items():
            found.setdefault(case, f"rank {rank}: {trace}")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saves(layout: str, wrong: dict[str, str]) -> None:
    assert f"save {layout}" not in wrong, wrong[f"save {layout}"]


@pytest.mark.parametrize(("saved", "loaded"), [*product(LAYOUTS, LAYOUTS)])
def test_loads(saved: str, loaded: str, wrong: dict[str, str]) -> None:
    assert f"{saved} to {loaded}" not in wrong, wrong[f"{saved} to {loaded}"]


def test_no_case_was_left_out(wrong: dict[str, str]) -> None:
    known = {f"save {name}" for name in (*LAYOUTS, "stages")}
    known |= {f"{a} to {b}" for a, b in product(LAYOUTS, LAYOUTS)}
    assert set(wrong) <= known


@pytest.mark.parametrize("layout", ["ddp", "hsdp", "fsdp4", "fsdp4 by columns", "by hand"])
def test_every_rank_writes_as_much(layout: str, root: Path) -> None:
    """To a page for each set of holders and the small tensors, which are not divided."""
    checkpoint = open_checkpoint(Folder(root / layout), SavePoint(1, 1, "a"))
    sizes = [
        sum(torch.Size(piece.size).numel() for piece in manifest.pieces)
        for manifest in checkpoint.manifests
    ]
    assert sum(sizes) == sum(
        torch.Size(tensor.shape).numel() for tensor in checkpoint.tensors.values()
    ), "an element was written twice"
    assert max(sizes) - min(sizes) <= 0.01 * sum(sizes) / WORLD + 1024


def test_stages_of_a_pipeline_load_together(root: Path) -> None:
    reader = CheckpointReader(open_checkpoint(Folder(root / "stages"), SavePoint(1, 1, "a")))
    expected = {name: value for rank in (0, 2) for name, value in stages(rank).items()}
    found = {name: torch.zeros_like(value) for name, value in expected.items() if "stage" in name}
    SaveEngine.read(reader, found)
    assert len(found) == 2
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
