"""One rank in an interpreter of its own that ends as its argument requests."""

import contextlib
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import distributed as dist
from torch import nn

from conftest import Line, Member
from outlast.errors import GroupError

how, fd, rank, world = sys.argv[1], *map(int, sys.argv[2:])
member = Member(Line(socket.socket(fileno=fd)), rank, world)
member.init()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
dist.barrier()
if how == "raise":
    raise ValueError("a user's bug")
if how == "exit":
    sys.exit(3)
if how == "destroy":
    dist.destroy_process_group()
if how == "pending" and rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)
if how == "pending_recv" and rank == 0:
    work = dist.irecv(torch.ones(4), 1)
if how == "severed":
    member.groups.sever(1)
if how == "any_source" and rank == 0:
    threading.Timer(0.3, member.groups.sever, [1]).start()
    with contextlib.suppress(GroupError):
        dist.recv(torch.ones(4))
