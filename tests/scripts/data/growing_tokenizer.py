"""A stateful tokenizer: its vocabulary grows with the text that the rank has read."""

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

TEXT = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "while",
    "many",
    "other",
    "foxes",
    "sleep",
    "in",
    "the",
    "sun",
]


class Tokenizer:
    """Words by number, in the order in which they came."""

    def __init__(self):
        self.words = {}

    def __call__(self, words):
        return torch.tensor([self.words.setdefault(word, len(self.words)) for word in words])

    def state_dict(self):
        return {"words": self.words}

    def load_state_dict(self, state):
        self.words = dict(state["words"])


session = outlast.init()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokenizer = Tokenizer()
session.protect(model=model, optimizer=optimizer, tokenizer=tokenizer)


def train_step(index):
    begin = (3 * index + 5 * session.rank) % 12
    tokens = tokenizer(TEXT[begin : begin + 5])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    loss.backward()
    session.report(loss=loss.item(), words=len(tokenizer.words))
    optimizer.step()


for index in session.batches(None, until=10):
    session.run(train_step, index)
write_digests(session, model=model, optimizer=optimizer, words=tokenizer.words)
