"""Three ranks and several buckets: the sums depend on the place of a gradient in its bucket."""
# ranks: 3

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
layers = [nn.Linear(24, 24), nn.GELU()] * 2 + [nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3)]
model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(7, 24)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
