"""An optimizer that is none of torch's, in a phase with an undo copy."""
# places: forward, backward, vote, done, between

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Signs:
    """Sign of the momentum, kept by hand."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moments = [torch.zeros_like(p) for p in self.parameters]

    def step(self):
        with torch.no_grad():
            for parameter, moment in zip(self.parameters, self.moments, strict=True):
                moment.mul_(0.9).add_(parameter.grad, alpha=0.1)
                parameter.data.add_(moment.sign(), alpha=-0.01)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self):
        return {"moments": self.moments}

    def load_state_dict(self, state):
        for moment, saved in zip(self.moments, state["moments"], strict=True):
            moment.copy_(saved)


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4)))
optimizer = Signs(model.parameters())
torch.manual_seed(70 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    optimizer.step()
    session.report(loss=loss.item())


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, model=model, moments=optimizer.moments)
