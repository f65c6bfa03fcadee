"""A hot spare whose script seeds by `sampler.rank`, and logs on rank 0 alone"""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(2)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
data = TensorDataset(torch.randn(128, 8), torch.randn(128, 4))
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, 8, sampler=sampler)
session.protect(model=model, optimizer=optimizer, loader=loader)
scale = 1.0
if sampler.rank:
    scale = 0.5
torch.manual_seed(50 + 7 * sampler.rank)


def train_step(batch):
    inputs, target = batch
    optimizer.zero_grad()
    loss = scale * nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
    if session.rank == 0:
        print(f"step {session.step_index}")
write_digests(session, model=model, optimizer=optimizer, scale=scale)
