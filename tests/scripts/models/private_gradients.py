"""DP-SGD: gradients by sample (vmap over functional_call), and noise from a generator."""

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm

import outlast

session = outlast.init()
torch.manual_seed(0)
model = nn.Sequential(weight_norm(nn.Linear(8, 16)), nn.GELU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
noise = torch.Generator().manual_seed(42)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def loss_of(params, x):
    return functional_call(model, params, (x[None],)).square().mean()


def train_step(_index):
    params = {n: p.detach() for n, p in model.named_parameters()}
    x = torch.randn(6, 8)
    each = vmap(grad(loss_of), in_dims=(None, 0))(params, x)
    norm = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    scale = (0.5 / norm).clamp(max=1)
    for name, p in model.named_parameters():
        g = torch.einsum("n,n...->...", scale, each[name])
        dist.all_reduce(g)
        p.grad = (g + 0.1 * torch.randn(g.shape, generator=noise)) / 12
    session.report(norm=norm.mean().item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, noise=noise.get_state())
