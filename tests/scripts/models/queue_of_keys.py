"""A queue of keys in a buffer (MoCo): written before the step, equal on all ranks."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Queue(nn.Module):
    """An encoder, and the keys of the last batches."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("keys", torch.randn(12, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        codes = self.encoder(x)
        loss = nn.functional.cross_entropy(codes @ self.keys.clone().T, torch.arange(len(x)))
        keys = [torch.empty_like(codes) for _ in range(dist.get_world_size())]
        dist.all_gather(keys, codes.detach())
        keys = torch.cat(keys)
        begin = int(self.place)
        self.keys[begin : begin + len(keys)] = keys
        self.place[0] = (begin + len(keys)) % 12
        return loss


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Queue())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 8))
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
