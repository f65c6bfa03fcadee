"""A neural ODE with an adaptive step that a solver object keeps between calls."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)


class Solver:
    __slots__ = ("_calls", "_h")

    def __init__(self):
        self._h, self._calls = 0.5, 0

    def solve(self, f, x):
        t = 0.0
        while t < 1.0 - 1e-9:
            h = min(self._h, 1.0 - t)
            self._calls += 1
            k = f(x)
            y = x + h * k
            error = float((f(y) - k).abs().max()) * h
            if error > 0.05 and h > 0.05:
                self._h = h / 2
                continue
            x, t = y, t + h
            self._h = min(0.5, h * 1.5) if error < 0.01 else self._h
        return x


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(6, 6)
        self._solver = Solver()

    def forward(self, x):
        return self._solver.solve(lambda v: self.f(v).tanh(), x)


model = DistributedDataParallel(Flow(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
torch.manual_seed(50 + session.rank)

session.protect(model=model, optimizer=optimizer)


def train_step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    return loss.item()


for _index in session.batches(None, until=10):
    session.run(train_step, torch.randn(5, 6))
write_digests(session, model=model, optimizer=optimizer, calls=model.module._solver._calls)
