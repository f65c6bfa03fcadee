"""Weight tying: the head is the embedding's weight."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast


class Tied(nn.Module):
    """Tokens to logits through one matrix."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(Tied())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(3 + session.rank)
session.protect(model=model, optimizer=optimizer)


def train_step(_index):
    optimizer.zero_grad()
    tokens = torch.randint(20, (3, 7))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    session.report(loss=loss.item())
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer)
