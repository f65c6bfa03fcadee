"""RL: rollouts wait for an environment, whose state is protected, then the policy learns."""

import threading

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Environment:
    """A walk that the policy pushes, with a slow answer."""

    def __init__(self, seed):
        self.place, self.generator = torch.zeros(4), torch.Generator().manual_seed(seed)

    def step(self, push):
        threading.Event().wait(0.05)
        self.place = 0.9 * self.place + push + torch.randn(4, generator=self.generator)
        return self.place.clone()

    def state_dict(self):
        return {"place": self.place, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place = state["place"].clone()
        self.generator.set_state(state["generator"])


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
environment = Environment(session.rank)
session.protect(model=model, optimizer=optimizer, environment=environment)


def train_step(_index):
    with torch.no_grad():
        x, seen = environment.place.clone(), []
        for _ in range(3):
            x = environment.step(model.module(x))
            seen.append(x)
    optimizer.zero_grad()
    loss = model(torch.stack(seen)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, place=environment.place)
