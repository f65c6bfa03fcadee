"""A WGAN: a critic with a gradient penalty (autograd.grad), a generator in each third step."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generates, judges = DistributedDataParallel(generator), DistributedDataParallel(critic)
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
optimizer_c = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
torch.manual_seed(50 + session.rank)
session.protect(
    generates=generates, judges=judges, optimizer_g=optimizer_g, optimizer_c=optimizer_c
)


def penalty(real, fake):
    share = torch.rand(len(real), 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    scores = judges(mixed)
    (slope,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean()


def train_critic(real):
    optimizer_c.zero_grad()
    fake = generator(torch.randn(len(real), 4)).detach()
    loss = judges(fake).mean() - judges(real).mean() + 10 * penalty(real, fake)
    loss.backward()
    session.report(critic=loss.item())
    optimizer_c.step()


def train_generator(count):
    optimizer_g.zero_grad()
    critic.requires_grad_(False)
    loss = -critic(generates(torch.randn(count, 4))).mean()
    loss.backward()
    critic.requires_grad_(True)
    session.report(generator=loss.item())
    optimizer_g.step()


for index in session.batches(None, until=10):
    real = torch.randn(6, 6) * 2 + 1
    session.run(train_critic, real)
    if index % 3 == 0:
        session.run(train_generator, len(real))
write_digests(session, generator=generates, critic=judges, g=optimizer_g, c=optimizer_c)
