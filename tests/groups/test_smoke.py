from __future__ import annotations
import torch
from torch import distributed as dist

def body(m):
    m.init()
    x = torch.ones(3) * (m.rank + 1)
    with m.groups.phase():
        dist.all_reduce(x)
    assert m.groups.unfinished() == 0
    g = dist.new_group([0, 1])
    if m.rank < 2:
        dist.all_reduce(x, group=g)
    assert m.groups.vote([1, 2]) == [m.world, 2*m.world]
    assert m.groups.gather_bytes(b"x"*m.rank) == [b"x"*i for i in range(m.world)]
    return x.tolist()

def test_smoke(cluster):
    print(cluster().run(3, body))
