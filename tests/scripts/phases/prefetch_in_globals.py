"""Prefetch in globals, as in nanoGPT: the step trains on X and fetches the next X itself."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
text = torch.randint(16, (500,))
model = DistributedDataParallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1337 + session.rank)
session.protect(model=model, optimizer=optimizer)


def get_batch():
    at = torch.randint(490, (4,))
    return torch.stack([text[i : i + 8] for i in at]), torch.stack(
        [text[i + 1 : i + 9] for i in at]
    )


X, Y = get_batch()


def train_step(_index):
    global X, Y
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(X).flatten(0, 1), Y.flatten())
    X, Y = get_batch()
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, next_batch=X)
