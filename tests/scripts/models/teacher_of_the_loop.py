"""Distillation: a frozen teacher that nobody protects, which the loop averages between phases."""

import copy

import torch
from digests import write_digests
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
teacher = copy.deepcopy(student).requires_grad_(False).eval()
model = DistributedDataParallel(student)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    inputs = torch.randn(5, 8)
    optimizer.zero_grad()
    loss = mse_loss(model(inputs), teacher(inputs)) + model(inputs).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
    with torch.no_grad():
        for average, weight in zip(teacher.parameters(), student.parameters(), strict=True):
            average.lerp_(weight, 0.1)
write_digests(session, model=model, optimizer=optimizer, teacher=teacher)
