"""Bit equality of every collective on stable groups and on plain gloo."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as fc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Tensors = list[torch.Tensor]
Case = Callable[[int, int], Tensors]
CASES: dict[str, Case] = {}
BACKENDS = ("gloo", "outlast", "seatless")


def case(body: Case) -> Case:
    CASES[body.__name__] = body
    return body


def _some(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank + 1))


@case
def all_reduce(rank: int, world: int) -> Tensors:
    made = [_some(rank, 1003), _some(rank, 7, 3)]
    dist.all_reduce(made[0])
    dist.all_reduce(made[1], dist.ReduceOp.MAX)
    work = dist.all_reduce(extra := _some(rank, 5), async_op=True)
    assert work is not None
    work.wait()
    return [*made, extra]


@case
def all_reduce_integers(rank: int, world: int) -> Tensors:
    made = [torch.arange(9) * rank, torch.tensor([rank == 1])]
    dist.all_reduce(made[0], dist.ReduceOp.PRODUCT)
    dist.all_reduce(made[1], dist.ReduceOp.MAX)
    return made


@case
def all_reduce_coalesced(rank: int, world: int) -> Tensors:
    made = [_some(rank, 11), _some(rank + 9, 4)]
    group = dist.group.WORLD
    group.allreduce_coalesced(made, dist.AllreduceCoalescedOptions()).wait()
    return made


@case
def broadcast(rank: int, world: int) -> Tensors:
    made = _some(rank, 33)
    dist.broadcast(made, world - 1)
    return [made]


@case
def reduce(rank: int, world: int) -> Tensors:
    made = _some(rank, 33)
    dist.reduce(made, 1)
    return [made] if rank == 1 else []


@case
def all_gather(rank: int, world: int) -> Tensors:
    slots = [torch.empty(6) for _ in range(world)]
    dist.all_gather(slots, _some(rank, 6))
    return slots


@case
def all_gather_into_tensor(rank: int, world: int) -> Tensors:
    flat, rows = torch.empty(world * 6), torch.empty(world * 2, 3)
    dist.all_gather_into_tensor(flat, _some(rank, 6))
    dist.all_gather_into_tensor(rows, _some(rank, 2, 3))
    return [flat, rows]


@case
def all_gather_coalesced(rank: int, world: int) -> Tensors:
    slots = [[torch.empty(4), torch.empty(2)] for _ in range(world)]
    dist.group.WORLD.allgather_coalesced(slots, [_some(rank, 4), _some(rank + 9, 2)]).wait()
    return [tensor for slot in slots for tensor in slot]


@case
def all_gather_into_tensor_coalesced(rank: int, world: int) -> Tensors:
    slots = [torch.empty(world * 4), torch.empty(world * 2)]
    inputs = [_some(rank, 4), _some(rank + 9, 2)]
    dist.group.WORLD.allgather_into_tensor_coalesced(slots, inputs).wait()
    return slots


@case
def reduce_scatter(rank: int, world: int) -> Tensors:
    out = torch.empty(5)
    dist.reduce_scatter(out, [_some(rank + 10 * i, 5) for i in range(world)])
    return [out]


@case
def reduce_scatter_tensor(rank: int, world: int) -> Tensors:
    out = torch.empty(5)
    dist.reduce_scatter_tensor(out, _some(rank, 5 * world))
    return [out]


@case
def reduce_scatter_tensor_coalesced(rank: int, world: int) -> Tensors:
    outs = [torch.empty(5), torch.empty(2)]
    inputs = [_some(rank, 5 * world), _some(rank + 7, 2 * world)]
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outs, inputs).wait()
    return outs


@case
def gather(rank: int, world: int) -> Tensors:
    slots = [torch.empty(3) for _ in range(world)] if rank == 1 else None
    dist.gather(_some(rank, 3), slots, dst=1)
    return slots or []


@case
def scatter(rank: int, world: int) -> Tensors:
    out = torch.empty(3)
    parts = [_some(i, 3) for i in range(world)] if rank == 0 else None
    dist.scatter(out, parts, src=0)
    return [out]


@case
def all_to_all_single(rank: int, world: int) -> Tensors:
    even, uneven = torch.empty(2 * world), torch.empty((rank + 1) * world)
    dist.all_to_all_single(even, _some(rank, 2 * world))
    given = _some(rank, sum(i + 1 for i in range(world)))
    splits = [i + 1 for i in range(world)]
    dist.all_to_all_single(uneven, given, [rank + 1] * world, splits)
    return [even, uneven]


@case
def all_to_all(rank: int, world: int) -> Tensors:
    outs = [torch.empty(4) for _ in range(world)]
    dist.all_to_all(outs, [_some(rank + i, 4) for i in range(world)])
    return outs


@case
def barrier(rank: int, world: int) -> Tensors:
    dist.barrier()
    return []


@case
def send_recv(rank: int, world: int) -> Tensors:
    out = torch.empty(9)
    if rank == 0:
        dist.send(_some(rank, 9), 1, tag=3)
        return []
    if rank == 1:
        assert dist.recv(out, 0, tag=3) == 0
        return [out]
    return []


@case
def recv_from_anyone(rank: int, world: int) -> Tensors:
    out = torch.empty(9)
    if rank == 0:
        assert dist.recv(out) == 1
        return [out]
    if rank == 1:
        dist.send(_some(rank, 9), 0)
    return []


@case
def batch_isend_irecv(rank: int, world: int) -> Tensors:
    out = torch.empty(70_000)
    ring = [
        dist.P2POp(dist.isend, _some(rank, 70_000), (rank + 1) % world),
        dist.P2POp(dist.irecv, out, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    return [out]


@case
def coalescing_manager(rank: int, world: int) -> Tensors:
    made = [_some(rank, 3), _some(rank + 1, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in made:
            dist.all_reduce(tensor)
    manager.wait()
    gathered = [torch.empty(3 * world), torch.empty(4 * world)]
    with dist._coalescing_manager():
        for slot, tensor in zip(gathered, made, strict=True):
            dist.all_gather_into_tensor(slot, tensor)
    return made + gathered


@case
def objects(rank: int, world: int) -> Tensors:
    every: list[Any] = [None] * world
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank})
    mine = [{"from": rank}, rank]
    dist.broadcast_object_list(mine, 1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for {i}" for i in range(world)] if rank == 0 else None, 0)
    gathered: list[Any] | None = [None] * world if rank == 1 else None
    dist.gather_object(rank * 3, gathered, 1)
    sent: list[Any] = ["said", rank] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(sent, 1)
    if rank == 1:
        dist.recv_object_list(sent, 0)
    return [_digest((every, mine, part, gathered, sent))]


@case
def functional(rank: int, world: int) -> Tensors:
    given, group = _some(rank, 2 * world), dist.group.WORLD
    made = [
        fc.all_reduce(given * 2, "sum", group),
        fc.all_gather_tensor(given, 0, group),
        fc.reduce_scatter_tensor(given, "sum", 0, group),
        fc.all_to_all_single(given, None, None, group),
        fc.broadcast(given, 0, group),
        *fc.all_reduce_coalesced([given, given + 1], "sum", group),
        *fc.all_gather_into_tensor_coalesced([given, given + 1], group),
        *fc.reduce_scatter_tensor_coalesced([given, given + 1], "sum", [0, 0], group),
    ]
    return [tensor + 0 for tensor in made]


@case
def subgroups(rank: int, world: int) -> Tensors:
    made = []
    for ranks in ([0, 1], [0, world - 1], [1]):
        group = dist.new_group(ranks)
        if rank in ranks:
            tensor = _some(rank, 5)
            dist.all_reduce(tensor, group=group)
            made.append(tensor)
    return made


@case
def data_parallel(rank: int, world: int) -> Tensors:
    made: Tensors = []
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))
        model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.001, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(_some(rank + 10 * step, 5, 8)).pow(2).mean().backward()
            optimizer.step()
        made += [tensor.detach().clone() for tensor in plain.state_dict().values()]
    return made


@case
def meshes(rank: int, world: int) -> Tensors:
    line = init_device_mesh("cpu", (world,))
    sharded = distribute_tensor(torch.arange(12.0), line, [Shard(0)])
    made = [sharded.to_local(), sharded.full_tensor(), (sharded * 2).sum().full_tensor()]
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        tensor = _some(rank, 6)
        dist.all_reduce(tensor, group=square["b"].get_group())
        both = distribute_tensor(torch.arange(16.0).view(4, 4), square, [Shard(0), Shard(1)])
        made += [
            tensor,
            both.to_local(),
            both.redistribute(square, [Shard(1), Replicate()]).to_local(),
        ]
    return made


if torch.__version__.startswith("2.11."):
    del CASES["all_to_all"]  # gloo of that release raises an error


def _digest(value: Any) -> torch.Tensor:
    data = hashlib.sha256(repr(value).encode()).digest()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _all(member: Any, backend: str, store: str) -> dict[str, list[bytes]]:
    warnings.simplefilter("ignore", FutureWarning)  # the older names are used on purpose
    member.init(backend, store)
    found = {}
    for name, body in CASES.items():
        tensors = body(member.rank, member.world)
        dist.barrier()  # nobody runs ahead into the next case
        found[name] = [tensor.contiguous().numpy().tobytes() for tensor in tensors]
    if backend == "outlast":
        assert member.groups.unfinished() == 0
        assert not member.troubles
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    make = request.getfixturevalue("clusters")
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    return [make().run(request.param, _all, backend, store + backend) for backend in BACKENDS]


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_equal_to_plain_gloo(both: Any, name: str) -> None:
    plain, *ours = both
    for backend, results in zip(BACKENDS[1:], ours, strict=True):
        for rank, (expected, found) in enumerate(zip(plain, results, strict=True)):
            assert found[name] == expected[name], f"{name} differs on rank {rank}, {backend}"


def _local_subgroup(member: Any, backend: str, store: str) -> list[bytes]:
    member.init(backend, store)
    if member.rank == 0:
        return []  # with local synchronisation the others do not even make the call
    group = dist.new_group(list(range(1, member.world)), use_local_synchronization=True)
    tensor = _some(member.rank, 5)
    dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return [tensor.numpy().tobytes()]


@pytest.mark.process
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_group_that_only_its_members_create(clusters: Any, world: int, tmp_path: Path) -> None:
    # Apart from the cases: torch names such a group by the number of groups that a rank has, which
    # differs behind other cases before 2.14, and for later groups from 2.14 on.
    store = str(tmp_path / "store")
    plain, ours = (
        clusters().run(world, _local_subgroup, backend, store) for backend in ("gloo", "outlast")
    )
    assert ours == plain


def _compiled(member: Any) -> list[list[float]]:
    warnings.simplefilter("ignore")  # inductor's own imports warn
    member.init()
    group = dist.group.WORLD

    @torch.compile(fullgraph=True)
    def together(given: torch.Tensor) -> Tensors:
        return [
            fc.all_reduce(given * 2, "sum", group) + 1,
            fc.all_gather_tensor(given, 0, group) * 2,
            fc.reduce_scatter_tensor(given, "sum", 0, group) + 0,
            fc.broadcast(given, 0, group) + 0,
        ]

    return [tensor.tolist() for tensor in together(torch.ones(2) * (member.rank + 1))]


@pytest.mark.extended
@pytest.mark.process
def test_under_inductor(cluster: Any) -> None:
    everywhere = [[7.0, 7.0], [2.0, 2.0, 4.0, 4.0], [3.0], [1.0, 1.0]]
    assert cluster.run(2, _compiled) == [everywhere, everywhere]
