"""A GAN: discriminator and generator step in one function, with an undo copy."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
maker_steps = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999))
judge_steps = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.999))
torch.manual_seed(30 + session.rank)
session.protect(maker=maker, judge=judge, maker_steps=maker_steps, judge_steps=judge_steps)


def train_step(_index):
    real, fake = torch.randn(6, 8) + 1, maker(torch.randn(6, 4))
    judge_steps.zero_grad()
    judge_loss = nn.functional.softplus(-judge(real)).mean()
    judge_loss = judge_loss + nn.functional.softplus(judge(fake.detach())).mean()
    judge_loss.backward()
    session.report(judge_loss=judge_loss.item())
    judge_steps.step()
    maker_steps.zero_grad()
    maker_loss = nn.functional.softplus(-judge(fake)).mean()
    maker_loss.backward()
    maker_steps.step()


for index in session.batches(None, until=10):
    session.run_with_undo(train_step, index)
write_digests(session, maker=maker, judge=judge, a=maker_steps, b=judge_steps)
