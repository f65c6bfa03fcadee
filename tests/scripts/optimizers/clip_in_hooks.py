"""AutoClip: hooks on parameters keep a history of norms, and clip after a warm-up."""
# steps: 12

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)


class AutoClip:
    def __init__(self, warm):
        self.norms, self.warm = [], warm

    def __call__(self, grad):
        self.norms.append(grad.norm().item())
        if len(self.norms) <= self.warm:
            return grad
        bound = sorted(self.norms)[len(self.norms) // 4]
        return grad * min(1.0, bound / (self.norms[-1] + 1e-6))


for p in model.parameters():
    p.register_hook(AutoClip(5))


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
