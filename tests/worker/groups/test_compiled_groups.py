"""Stable groups under torch.compile: graph breaks as with torch's own groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

pytestmark = pytest.mark.process
WORLD = 2
Compile = Callable[[Any], Any]


def _model() -> nn.Module:
    torch.manual_seed(0)  # BatchNorm: DDP broadcasts its buffers in front of each forward
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8))


def _around(compiled: Compile) -> Any:
    return compiled(nn.parallel.DistributedDataParallel(_model()))


def _inside(compiled: Compile) -> Any:
    return nn.parallel.DistributedDataParallel(compiled(_model()))


def _step(compiled: Compile) -> Any:
    model = nn.parallel.DistributedDataParallel(_model())
    forward = compiled(lambda x: model(x) * 2)
    forward.parameters = model.parameters
    return forward


def _own_collectives(compiled: Compile) -> Any:
    model = nn.parallel.DistributedDataParallel(_model())
    pair: Any = dist.new_group([0, 1])

    def metric(x: torch.Tensor) -> torch.Tensor:
        total = x.detach() * 2
        work = dist.all_reduce(total, async_op=True, group=pair)
        assert work is not None
        work.wait()
        dist.broadcast(total, 0, group=pair)
        return total + dist.get_rank()

    measured = compiled(metric)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x + 0 * measured(x).sum())

    forward.parameters = model.parameters  # type: ignore[attr-defined]
    return forward


SHAPES: dict[str, Callable[[Compile], Any]] = {
    "around": _around, "inside": _inside, "step": _step, "own": _own_collectives
}  # fmt: skip


def _train(member: Any, backend: str, store: str) -> list[float]:
    warnings.simplefilter("ignore")
    member.init("outlast" if not store else "gloo", store)
    sums = []
    for name, shape in SHAPES.items():
        torch._dynamo.reset()
        model = shape(lambda target: torch.compile(target, backend=backend))
        for index in range(2):
            torch.manual_seed(10 * index + member.rank)
            model(torch.randn(4, 8)).pow(2).mean().backward()
        gradients = [p.grad for p in model.parameters()]
        assert all(g is not None for g in gradients), name
        sums.append(sum(float(g.double().sum()) for g in gradients if g is not None))
    return sums


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_compiled_functions_train_as_on_plain_gloo(
    clusters: Any, backend: str, tmp_path: Any
) -> None:
    ours = clusters().run(WORLD, _train, backend, "")
    assert ours == clusters().run(WORLD, _train, backend, str(tmp_path / "store"))
