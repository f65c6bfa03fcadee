"""Context parallel by all-to-all (Ulysses): sequences are split for layers, heads for attention."""
# ranks: 2

import torch
from digests import write_digests
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import outlast


def exchange(x):
    """Swap halves of the first dimension between the ranks."""
    sizes = [len(x) // 2] * 2
    return all_to_all_single_autograd(x.contiguous(), sizes, sizes, torch.distributed.group.WORLD)


class Block(nn.Module):
    """Attention over the whole sequence, of which each rank holds a part."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):  # part of the sequence, batch, features
        parts = self.mix(x).unflatten(-1, (3, 4, 2)).permute(3, 2, 1, 0, 4)  # heads first
        parts = exchange(parts).unflatten(0, (2, 2)).permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts.transpose(0, 1).contiguous())
        mixed = exchange(mixed.unflatten(2, (2, -1)).permute(2, 0, 1, 3, 4).flatten(0, 1))
        return x + self.head(mixed.permute(2, 1, 0, 3).flatten(2))


session = outlast.init()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (session.world_size,))
model = Block()
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(7)  # ranks hold parts of the same sequences
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    part = torch.randn(8, 3, 8).chunk(session.world_size)[session.rank]
    loss = model(part.contiguous()).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
