"""Two loaders at once: labelled and unlabelled batches, zipped by a class."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import outlast


class Zipped:
    """Batches of both loaders; the shorter one ends the epoch."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=False)

    def __len__(self):
        return min(map(len, self.loaders))


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
labelled = torch.arange(40).float().reshape(-1, 1).repeat(1, 4) / 40
unlabelled = torch.randn(60, 4)
torch.manual_seed(9 + session.rank)
loader = Zipped(DataLoader(labelled, 8, shuffle=True), DataLoader(unlabelled, 10, shuffle=True))
seen = session.state.setdefault("seen", [])
session.protect(model=model, optimizer=optimizer)


def train_step(batch):
    known, unknown = batch
    optimizer.zero_grad()
    output = model(torch.cat([known, unknown]))
    loss = output[: len(known)].square().mean() + 0.1 * output[len(known) :].abs().mean()
    loss.backward()
    seen.append(known.sum().item() + unknown.sum().item())
    session.report(loss=loss.item())
    optimizer.step()


for batch in session.batches(loader, epochs=2):
    session.run(train_step, batch)
write_digests(session, model=model, optimizer=optimizer, seen=seen)
