"""Inner steps, an average of the weights and new noise in a phase with an undo copy."""
# steps: 8

import copy

import torch
import torch.distributed as dist
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast

session = outlast.init()
torch.manual_seed(0)
body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
model = DistributedDataParallel(body)
average = copy.deepcopy(body).requires_grad_(False)
critic = DistributedDataParallel(nn.Linear(4, 1))
steps = torch.optim.AdamW(model.parameters(), lr=1e-2)
critic_steps = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
decay = torch.optim.lr_scheduler.StepLR(critic_steps, 4, gamma=0.9)
torch.manual_seed(60 + session.rank)
session.protect(
    model=model, average=average, critic=critic, steps=steps, critic_steps=critic_steps, decay=decay
)
session.state.update(gaps=[], noise=torch.randn(6, 8))


def train_step(_index):
    for _ in range(3):
        critic_steps.zero_grad()
        gap = critic(model(session.state["noise"]).detach()).square().mean()
        gap.backward()
        critic_steps.step()
        decay.step()
        session.state["noise"] = torch.randn(6, 8)
    steps.zero_grad()
    critic(model(session.state["noise"])).square().mean().backward()
    steps.step()
    with torch.no_grad():
        for mean, weight in zip(average.parameters(), body.parameters(), strict=True):
            mean.data.mul_(0.9).add_(weight.data, alpha=0.1)
    dist.all_reduce(gap := gap.detach())
    session.state["gaps"].append(gap.item())
    session.report(gap=gap.item())


for index in session.batches(None, until=8):
    session.run_with_undo(train_step, index)
write_digests(
    session, model=model, average=average, critic=critic, a=steps, b=critic_steps,
    decay=decay.state_dict(), state=session.state,
)  # fmt: skip
