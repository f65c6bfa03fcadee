"""FSDP2, tensor parallel, DTensor, meshes, functional and compiled collectives on 4 CPU ranks.

The tests stand on the bases of torch's own ones, and compare with one process that has all data.
`suites.py` sets `backend_name`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed import _functional_collectives as functional
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.common_fsdp import MLPStack, check_sharded_parity
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule

WIDTH = 10  # layers have 10, 30 and 40 rows: some shards of 4 ranks are uneven
STEPS = 3


def everyone() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a tensor that may be a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ParallelTests(DTensorTestBase):
    """Each test makes its groups by `mesh`, and may run again in the same processes."""

    backend_name = "gloo"

    @property
    def world_size(self) -> int:
        return 4

    @property
    def device_type(self) -> str:
        return "cpu"

    def _init_pg(self) -> None:
        store = FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            self.backend_name,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=60),
        )

    def mesh(self, **dimensions: int) -> DeviceMesh:
        self._init_pg()
        return init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))

    def _batch(self, step: int, rank: int, parts: int) -> torch.Tensor:
        """Return a rank's part of a step's batch of 8, the same on all ranks of one part."""
        every = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        return every.chunk(parts)[rank]

    def _train_beside(self, sharded: nn.Module, plain: nn.Module) -> None:
        """Train both; compare losses, parameters and gradients in each step."""
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (sharded, plain)]
        for step in range(STEPS):
            loss = sharded(self._batch(step, self.rank, 4)).pow(2).mean()
            loss.backward()
            expected = plain(self._batch(step, 0, 1)).pow(2).mean()
            expected.backward()
            mean = functional.all_reduce(loss.detach(), "sum", everyone()) / 4
            self.assertEqual(mean, expected.detach())
            check_sharded_parity(self, plain, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def _stack(self) -> MLPStack:
        torch.manual_seed(7)
        return MLPStack(WIDTH)

    def _shard(self, model: nn.Module, **options: Any) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return model

    # --- FSDP2 ---

    def test_fsdp2(self) -> None:
        mesh = self.mesh(data=4)
        for reshard in (True, False):
            sharded = self._shard(self._stack(), mesh=mesh, reshard_after_forward=reshard)
            self._train_beside(sharded, self._stack())

    def test_fsdp2_with_offload_and_clipping(self) -> None:
        mesh = self.mesh(data=4)
        policy = CPUOffloadPolicy(pin_memory=False)
        sharded = self._shard(self._stack(), mesh=mesh, offload_policy=policy)
        plain = self._stack()
        sharded(self._batch(0, self.rank, 4)).pow(2).mean().backward()
        plain(self._batch(0, 0, 1)).pow(2).mean().backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (sharded, plain)]
        self.assertEqual(whole(norms[0]), norms[1])
        check_sharded_parity(self, plain, sharded)

    def test_fsdp2_in_bfloat16(self) -> None:
        mesh = self.mesh(data=4)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        sharded = self._shard(self._stack(), mesh=mesh, mp_policy=policy)
        loss = sharded(self._batch(0, self.rank, 4)).float().pow(2).mean()
        loss.backward()
        for parameter in sharded.parameters():
            assert parameter.grad is not None
            self.assertEqual(parameter.grad.dtype, torch.float32)
        total = functional.all_reduce(loss.detach(), "sum", everyone()) / 4
        plain = self._stack()(self._batch(0, 0, 1)).pow(2).mean()
        self.assertEqual(total, plain.detach(), atol=1e-3, rtol=2e-2)

    def test_hsdp(self) -> None:
        mesh = self.mesh(replicas=2, shards=2)
        self._train_beside(self._shard(self._stack(), mesh=mesh), self._stack())

    def test_full_state_dict(self) -> None:
        mesh = self.mesh(data=4)
        sharded, plain = self._shard(self._stack(), mesh=mesh), self._stack()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(sharded, options=options)
        if self.rank == 0:
            self.assertEqual(state, plain.state_dict())

    # --- tensor parallel ---

    def _train_pair(
        self, parallel: nn.Module, plain: nn.Module, feed: Callable[[int], torch.Tensor]
    ) -> None:
        for step in range(STEPS):
            outputs = [each(feed(step)) for each in (parallel, plain)]
            self.assertEqual(outputs[0], outputs[1])
            for each, output in zip((parallel, plain), outputs, strict=True):
                output.pow(2).sum().backward()
                torch.optim.SGD(each.parameters(), lr=0.05).step()
                each.zero_grad()
        for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
            self.assertEqual(whole(ours), theirs)

    def test_tensor_parallel(self) -> None:
        mesh = self.mesh(tensor=4)
        plain = MLPModule("cpu")
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        parallel = parallelize_module(copy.deepcopy(plain), mesh, plan)

        def feed(step: int) -> torch.Tensor:
            return torch.randn(5, 10, generator=torch.Generator().manual_seed(step))

        self._train_pair(parallel, plain, feed)

    def test_sequence_parallel(self) -> None:
        mesh = self.mesh(tensor=4)
        torch.manual_seed(3)
        plain = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {
            "0": SequenceParallel(sequence_dim=1),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(),
        }
        parallel = parallelize_module(copy.deepcopy(plain), mesh, plan)
        parallel = parallelize_module(
            nn.Sequential(parallel),
            mesh,
            {"0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))},
        )

        def feed(step: int) -> torch.Tensor:
            return torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))

        self._train_pair(parallel, plain, feed)

    def test_loss_parallel(self) -> None:
        mesh = self.mesh(tensor=4)
        scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        classes = torch.arange(6)
        plain = scores.clone().requires_grad_()
        expected = nn.functional.cross_entropy(plain, classes)
        expected.backward()
        parallel = distribute_tensor(scores, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss = nn.functional.cross_entropy(parallel, classes)
            loss.backward()
        assert parallel.grad is not None
        self.assertEqual(whole(loss), expected)
        self.assertEqual(whole(parallel.grad), plain.grad)

    def test_fsdp2_with_tensor_parallel(self) -> None:
        mesh = self.mesh(data=2, tensor=2)
        torch.manual_seed(7)
        plain = MLPStack(16)
        parallel = copy.deepcopy(plain).parallelize(mesh["tensor"], mesh["data"], False)
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
        for _ in range(STEPS):
            part = batch.chunk(2)[mesh["data"].get_local_rank()]
            parallel(part).pow(2).mean().backward()
            plain(batch).pow(2).mean().backward()
            for ours, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
                self.assertEqual(whole(ours), theirs)
                assert ours.grad is not None
                self.assertEqual(whole(ours.grad), theirs.grad)
            for each in (parallel, plain):
                torch.optim.SGD(each.parameters(), lr=0.05).step()
                each.zero_grad()

    # --- DTensor and meshes ---

    def test_redistribute(self) -> None:
        mesh = self.mesh(rows=2, columns=2)
        values = torch.arange(35.0).view(5, 7)
        kinds = (Replicate(), Shard(0), Shard(1))
        places = [(first, second) for first in kinds for second in kinds]
        for source in places:
            given = distribute_tensor(values, mesh, source)
            for target in places:
                moved = given.redistribute(mesh, target)
                self.assertEqual(moved.placements, target)
                self.assertEqual(whole(moved), values)

    def test_operators(self) -> None:
        mesh = self.mesh(data=4)
        left = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
        right = torch.randn(12, 8, generator=torch.Generator().manual_seed(2))
        for first in (Replicate(), Shard(0), Shard(1)):
            for second in (Replicate(), Shard(0), Shard(1)):
                a = distribute_tensor(left, mesh, [first])
                b = distribute_tensor(right, mesh, [second])
                self.assertEqual(whole(a @ b), left @ right)
        summed: Any = distribute_tensor(left, mesh, [Shard(0)]).sum(0)
        self.assertEqual(summed.placements, (Partial("sum"),))
        self.assertEqual(whole(summed), left.sum(0))
        normal: Any = nn.functional.softmax(distribute_tensor(left, mesh, [Shard(1)]), 1)
        self.assertEqual(whole(normal), nn.functional.softmax(left, 1))

    def test_mesh_slices(self) -> None:
        mesh = self.mesh(replicas=2, shards=2)
        flat = mesh["replicas", "shards"]._flatten("all")
        for part, expected in (
            (mesh["replicas"], [2.0, 4.0, 2.0, 4.0]),
            (mesh["shards"], [1.0, 1.0, 5.0, 5.0]),
            (flat, [6.0] * 4),
        ):
            value = torch.tensor([float(self.rank)])
            dist.all_reduce(value, group=part.get_group())
            self.assertEqual(value.item(), expected[self.rank])
        self.assertEqual(dist.get_process_group_ranks(flat.get_group()), [0, 1, 2, 3])

    # --- functional and compiled collectives ---

    def _collectives(self, given: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return [
            functional.all_reduce(given * 2, "sum", group) + 1,
            functional.all_gather_tensor(given, 0, group) * 2,
            functional.reduce_scatter_tensor(given, "sum", 0, group) + 0,
            functional.all_to_all_single(given, None, None, group) + 0,
            functional.broadcast(given, 1, group) + 0,
        ]

    def _check_collectives(self, found: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        total, mine = sum(given[1:], given[0]), slice(2 * self.rank, 2 * self.rank + 2)
        self.assertEqual(found[0], total * 2 + 1)
        self.assertEqual(found[1], torch.cat(given) * 2)
        self.assertEqual(found[2], total[mine])
        self.assertEqual(found[3], torch.cat([each[mine] for each in given]))
        self.assertEqual(found[4], given[1])

    def test_functional_collectives(self) -> None:
        self.mesh(all=4)
        given = [torch.arange(8.0) * (rank + 1) for rank in range(4)]
        self._check_collectives(self._collectives(given[self.rank], everyone()), given)

    def test_functional_collectives_in_backward(self) -> None:
        self.mesh(all=4)
        group = everyone()
        weight = torch.full((8,), float(self.rank + 1), requires_grad=True)
        gathered = functional.all_gather_tensor_autograd(weight, 0, group)
        scattered = functional.reduce_scatter_tensor_autograd(weight * 2, "sum", 0, group)
        (gathered.sum() + scattered.sum() * 3).backward()
        # 4 ranks use each gathered element once; a scattered one goes to one rank, times 2 and 3
        self.assertEqual(weight.grad, torch.full((8,), 4.0 + 6.0))

    def _compiled(self, backend: str) -> None:
        self.mesh(all=4)
        group = everyone()

        @torch.compile(fullgraph=True, backend=backend)
        def together(value: torch.Tensor) -> list[torch.Tensor]:
            return self._collectives(value, group)

        given = [torch.arange(8.0) * (rank + 1) for rank in range(4)]
        for _ in range(2):
            self._check_collectives(together(given[self.rank]), given)

    def test_compiled_collectives(self) -> None:
        self._compiled("aot_eager")

    def test_collectives_under_inductor(self) -> None:
        self._compiled("inductor")
