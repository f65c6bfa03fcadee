"""examples/plain_ddp.py, ported to Outlast: ranks may be killed, and the digest is the same.

outlast run --nproc-per-node 2 --spares 1 examples/ported_ddp.py
"""

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

session = outlast.init()
rank = dist.get_rank()

torch.manual_seed(0)
inputs = torch.randn(2048, 16)
labels = (inputs[:, :4] > 0).sum(dim=1)
dataset = TensorDataset(inputs, labels)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler)
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + rank)  # each rank draws other dropout masks

session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    inputs, labels = batch
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


for epoch in session.epochs(args.epochs):
    sampler.set_epoch(epoch)
    for index, batch in session.enumerate(loader, start=1):
        loss = session.run(train_step, batch)
        if rank == 0 and index == len(loader):
            print(f"epoch {epoch + 1}: loss {loss:.4f}", flush=True)

if rank == 0:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print(f"parameters sha256 {digest.hexdigest()}", flush=True)
