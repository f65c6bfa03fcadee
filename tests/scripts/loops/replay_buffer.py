"""DQN: transitions as named tuples in a deque, actions by Python's random, copies of the target."""

import random
from collections import deque, namedtuple

import numpy as np
import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

Transition = namedtuple("Transition", "state action reward after")


class Environment:
    def __init__(self, seed):
        self.rng, self.place = np.random.default_rng(seed), np.zeros(2, dtype=np.float32)

    def step(self, action):
        moved = 0.9 * self.place + 0.1 * self.rng.normal(size=2) + (0.1 if action else -0.1)
        self.place = moved.astype(np.float32)
        return self.place.copy(), float(-np.abs(moved).sum())


def network():
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


session = outlast.init()
torch.manual_seed(0)
online, target = network(), network().requires_grad_(False)
target.load_state_dict(online.state_dict())
model = DistributedDataParallel(online)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-2)
random.seed(1 + session.rank)
environment, memory, epsilon = Environment(session.rank), deque(maxlen=32), 1.0
session.protect(model=model, target=target, optimizer=optimizer)


def act(state):
    if random.random() < epsilon:
        return random.randrange(2)
    return int(online(torch.from_numpy(state)).argmax())


def learn(batch):
    state, action, reward, after = (np.stack(column) for column in zip(*batch, strict=True))
    optimizer.zero_grad()
    goal = torch.from_numpy(reward) + 0.9 * target(torch.from_numpy(after)).max(1).values
    taken = model(torch.from_numpy(state)).gather(1, torch.from_numpy(action)[:, None])
    loss = nn.functional.smooth_l1_loss(taken[:, 0], goal.float())
    loss.backward()
    session.report(loss=loss.item(), epsilon=epsilon)
    optimizer.step()


for _ in session.batches(None, until=10):
    for _ in range(4):
        before = environment.place.copy()
        action = act(before)
        after, reward = environment.step(action)
        memory.append(Transition(before, action, reward, after))
    session.run(learn, random.sample(memory, 4))
    epsilon = max(0.1, epsilon * 0.8)
    if session.step_index % 3 == 0:
        target.load_state_dict(online.state_dict())
parts = {"memory": [list(each) for each in memory], "epsilon": epsilon, "drawn": random.random()}
write_digests(session, model=model, optimizer=optimizer, target=target, **parts)
