"""An optimizer with a count of its own, a list and a late key in its group; with an undo copy."""
# steps: 8

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Annealed(torch.optim.Optimizer):
    """SGD whose rate falls with counts that belong to no parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "history": []})

    @torch.no_grad()
    def step(self):
        count = self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        for group in self.param_groups:
            group["history"].append(count)
            group["step"] = group["step"] + 1 if "step" in group else 1
            rate = group["lr"] / (count + 0.1 * group["step"] + 0.01 * len(group["history"]))
            for p in group["params"]:
                p.add_(p.grad, alpha=-rate)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = Annealed(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
    session.report(loss=loss.item())


for index in session.batches(None, until=8):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
