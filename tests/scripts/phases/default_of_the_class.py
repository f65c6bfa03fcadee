"""A Trainer class whose counter begins as a default in the class's body, and warms the rate up."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Trainer:
    """A model, its optimizer, and a counter."""

    count = 0

    def __init__(self, session):
        self.session = session
        self.model = DistributedDataParallel(nn.Linear(8, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        session.protect(model=self.model, optimizer=self.optimizer)

    def train_step(self, _index):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.05 * min(self.count, 4)
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 8)).square().mean()
        loss.backward()
        self.session.report(loss=loss.item())
        self.optimizer.step()


session = outlast.init()
torch.manual_seed(0)
trainer = Trainer(session)
torch.manual_seed(3 + session.rank)
for index in session.batches(None, until=10):
    session.run(trainer.train_step, index)
write_digests(session, model=trainer.model, count=trainer.count)
