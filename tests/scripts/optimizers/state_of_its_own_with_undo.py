"""An optimizer, and a scheduler, that keep counts in all places there are; with an undo copy."""
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
        self.calls, self.dice = 0, torch.Generator().manual_seed(7)

    @torch.no_grad()
    def step(self):
        self.calls += 1
        count = self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        for group in self.param_groups:
            group["history"].append(count)
            group["step"] = group["step"] + 1 if "step" in group else 1
            rate = group["lr"] / (count + 0.1 * group["step"] + 0.01 * len(group["history"]))
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.dice) / 100 / self.calls
                p.add_(p.grad + noise, alpha=-rate)


class Late(torch.optim.lr_scheduler.LRScheduler):
    """A rate that falls with an attribute of the first step."""

    def get_lr(self):
        if self.last_epoch > 0:
            self.seen = self.seen + 1 if hasattr(self, "seen") else 1
        return [rate / (1 + getattr(self, "seen", 0)) for rate in self.base_lrs]


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 4))
optimizer = Annealed(model.parameters(), lr=0.1)
torch.manual_seed(3 + session.rank)
scheduler = Late(optimizer)
session.protect(model=model, optimizer=optimizer, scheduler=scheduler)


def train_step(_index):
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
    session.report(loss=loss.item())


for index in session.batches(None, until=8):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
