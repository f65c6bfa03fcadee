"""Distillation: a teacher that is a moving average of the student, written by hand."""

import copy

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
student = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
)
teacher = copy.deepcopy(student.module).requires_grad_(requires_grad=False)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(student=student, teacher=teacher, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    x = torch.randn(6, 8)
    loss = (student(x) - teacher(x + 0.1 * torch.randn(6, 8))).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()
    with torch.no_grad():
        for mean, value in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.lerp_(value, 0.1)


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, student=student, teacher=teacher, optimizer=optimizer)
