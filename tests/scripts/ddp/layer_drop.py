"""LayerDrop: each step skips layers that its generator draws, the same on all ranks."""
# ranks: 3

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Net(nn.Module):
    """Residual layers, some of which are left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

    def forward(self, x, kept):
        for layer, keep in zip(self.layers, kept, strict=True):
            x = x + torch.tanh(layer(x)) if keep else x
        return x


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Net(), find_unused_parameters=True, bucket_cap_mb=0.001)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
drawn = torch.Generator().manual_seed(8)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer, drawn=drawn)


def train_step(_index):
    optimizer.zero_grad()
    kept = (torch.rand(5, generator=drawn) > 0.4).tolist()
    loss = model(torch.randn(5, 12, requires_grad=True), kept).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
