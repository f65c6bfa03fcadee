"""Sample states, and transfers between them without files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from outlast.checkpoint.format import codec
from outlast.checkpoint.format.manifests import Tensor
from outlast.checkpoint.load.state_fitting import SavedState, StateFitting
from outlast.checkpoint.save.shard_plan import dtype_name
from outlast.checkpoint.script_state import ScriptState
from outlast.checkpoint.state_content import flatten_state


@pytest.fixture(scope="module", autouse=True)
def world_of_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    part = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return nn.Sequential(nn.Linear(4, 6), part, nn.Linear(6, 2))


def compiled(network: nn.Module) -> Any:
    """Compile with the eager backend: import of the default one takes seconds."""
    return torch.compile(network, backend="eager")


def trained(network: nn.Module, steps: int = 2, **settings: Any) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, **settings)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for _ in range(steps):
        network(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {"model": network, "optimizer": optimizer, "scheduler": scheduler}


def saved(state: dict[str, Any]) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """Return the content of a checkpoint of `state`, and the values of its tensors."""
    content = flatten_state(ScriptState(state))
    shared = codec.decode(content.shared)
    values = {name: full(tensor).clone() for name, tensor in content.tensors.items()}
    specs = {n: Tensor(dtype_name(t.dtype), tuple(t.shape)) for n, t in content.tensors.items()}
    return SavedState(specs, shared, shared["rest"]), values


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def move(source: dict[str, Any], target: dict[str, Any], **settings: Any) -> StateFitting:
    """Save `source` and load it into `target`."""
    there, values = saved(source)
    fitting = StateFitting(ScriptState(target), there, **settings)
    assert fitting.differences == [] and not fitting.spare
    for name, into in fitting.targets.items():
        (into.to_local() if isinstance(into, DTensor) else into).copy_(values[name])
    fitting.finish()
    return fitting


def differences(source: dict[str, Any], target: dict[str, Any]) -> list[str]:
    there, _ = saved(source)
    before = saved(target)[1]
    fitting = StateFitting(ScriptState(target), there)
    after = saved(target)[1]
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    return fitting.differences + [f"{name}: missing here" for name in sorted(fitting.spare)]


def same_moments(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    pairs = zip(a.param_groups, b.param_groups, strict=True)
    for p, q in ((p, q) for g, h in pairs for p, q in zip(g["params"], h["params"], strict=True)):
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            other = b.state[q][key]
            assert value.dtype == other.dtype and torch.equal(full(value), full(other)), key


class Holding:
    """Object whose state_dict is a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state
