"""A schedule-free SGD that swaps the weights for evaluations."""
# steps: 12

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        start = {"lr": lr, "beta": beta, "train_mode": True, "weight_sum": 0.0}
        super().__init__(params, start)

    @torch.no_grad()
    def swap(self, to_train):
        (group,) = self.param_groups
        beta = group["beta"]
        if group["train_mode"] != to_train:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - beta if to_train else 1 - 1 / beta)
            group["train_mode"] = to_train

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        lr = group["lr"]
        group["weight_sum"] += lr**2
        share = lr**2 / group["weight_sum"]
        for p in group["params"]:
            if "z" not in self.state[p]:
                self.state[p]["z"] = p.clone()
            z = self.state[p]["z"]
            p.lerp_(z, share)
            p.add_(p.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
            z.sub_(p.grad, alpha=lr)


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = ScheduleFree(model.parameters(), 0.1)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


@torch.no_grad()
def evaluate():
    session.report(score=model(torch.ones(3, 8)).square().mean().item())


for index in session.batches(None, until=12):
    session.run(train_step, index)
    if session.step_index % 3 == 0:
        optimizer.swap(to_train=False)
        session.run(evaluate)
        optimizer.swap(to_train=True)
write_digests(session, model=model, optimizer=optimizer)
