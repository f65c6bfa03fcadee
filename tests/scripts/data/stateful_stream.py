"""torchdata's StatefulDataLoader over a stream with a state, whose two processes draw."""

import random

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import outlast


class Stream(IterableDataset):
    """Numbers with noise; it knows its place, and not where its generators are."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        while self.at < 60:
            self.at += 1
            if self.at % info.num_workers == info.id:
                yield torch.full((4,), self.at / 60) + torch.randn(4) + random.random()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = StatefulDataLoader(Stream(), batch_size=10, num_workers=2)
torch.manual_seed(9 + session.rank)
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer, loader=loader)


def train_step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    seen.append(batch.sum().item())
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, until=10):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
