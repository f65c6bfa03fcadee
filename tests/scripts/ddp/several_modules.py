"""Encoder and decoder with a DDP each, behind one optimizer."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
encoder = DistributedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.GELU()))
decoder = DistributedDataParallel(nn.Linear(12, 8))
optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(encoder=encoder, decoder=decoder, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    x = torch.randn(5, 8)
    loss = (decoder(encoder(x)) - x).square().mean()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, encoder=encoder, decoder=decoder, optimizer=optimizer)
