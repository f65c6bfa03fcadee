"""A Trainer in main(), whose state is a dataclass that a rare evaluation shares."""

import copy
import dataclasses

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


@dataclasses.dataclass
class TrainerState:
    """As libraries have it."""

    global_step: int = 0
    best_metric: float | None = None
    log_history: list = dataclasses.field(default_factory=list)


class Trainer:
    """A model, its optimizer, and the training loop."""

    def __init__(self, session):
        self.session, self.state, self.running = session, TrainerState(), 0.0
        self.model = DistributedDataParallel(nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        session.protect(model=self.model, optimizer=self.optimizer)

    def training_step(self, _index):
        loss = self.model(torch.randn(5, 8)).square().mean()
        loss.backward()
        self.session.report(loss=loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def evaluate(self):
        with torch.no_grad():
            return self.model(torch.ones(3, 8)).mean().item()

    def train(self):
        for index in self.session.batches(None, until=10):
            self.running += self.session.run(self.training_step, index).item()
            self.state.global_step += 1
            if self.state.global_step % 2 == 0:
                self.state.log_history.append(self.running / 2)
                self.running = 0.0
            if self.state.global_step == 9:  # a phase that most successors have not seen
                metric = self.session.run(self.evaluate)
                self.state.best_metric = max(metric, self.state.best_metric or metric)


def main():
    session = outlast.init()
    torch.manual_seed(0)
    trainer = Trainer(session)
    torch.manual_seed(3 + session.rank)
    trainer.train()
    write_digests(session, model=trainer.model, state=copy.deepcopy(vars(trainer.state)))


if __name__ == "__main__":
    main()
