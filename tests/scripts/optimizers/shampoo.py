"""A Shampoo-like optimizer: lists and dicts in its state, some of them made late."""
# steps: 12

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr, every=4):
        super().__init__(params, {"lr": lr, "every": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["precon"] = [1e-4 * torch.eye(n) for n in p.shape]
                state["step"] += 1
                grad = p.grad
                for dim, precon in enumerate(state["precon"]):
                    flat = grad.transpose(0, dim).reshape(p.shape[dim], -1)
                    precon.add_(flat @ flat.T)
                if state["step"] % group["every"] == 0:
                    state["inverse"] = {}
                    for dim, precon in enumerate(state["precon"]):
                        values, vectors = torch.linalg.eigh(precon)
                        state["inverse"][dim] = (
                            vectors @ torch.diag(values.clamp_min(1e-6) ** -0.25) @ vectors.T
                        )
                for dim, inverse in state.get("inverse", {}).items():
                    grad = (
                        torch.tensordot(inverse, grad, ([1], [dim])).transpose(0, dim)
                        if dim
                        else inverse @ grad
                    )
                p.add_(grad.reshape(p.shape), alpha=-group["lr"])


model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = Shampoo(model.parameters(), 0.05)
session.protect(model=model, optimizer=optimizer)
torch.manual_seed(3 + session.rank)


def train_step(index):
    optimizer.zero_grad()
    loss = model(torch.randn(5, 8)).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=12):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
