"""A Muon-like optimizer of one's own: momentum, made orthogonal by Newton-Schulz."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Muon(torch.optim.Optimizer):
    """Orthogonal updates for matrices, plain ones for the rest."""

    def __init__(self, parameters, lr=0.02, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.mul_(group["momentum"]).add_(parameter.grad)
                update = mean / (mean.norm() + 1e-7)
                for _ in range(3 if update.dim() == 2 else 0):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                parameter.add_(update, alpha=-group["lr"])


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))

optimizer = Muon(model.parameters())
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
