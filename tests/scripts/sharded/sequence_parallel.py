"""Sequence parallel: norms work on parts of the sequence, linear layers and the loss on shards."""
# ranks: 2
# refused: is a partial sum

import torch
from digests import write_digests
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import outlast


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.feed(self.norm(x)))


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (session.world_size,))
model = Block()
plan = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed.0": ColwiseParallel(),
    "feed.2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}
model = parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7)  # ranks of one model read the same samples
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    tokens, target = torch.randint(12, (3, 8)), torch.randint(12, (24,))
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target)
        loss.backward()
    session.report(loss=loss.full_tensor().item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
