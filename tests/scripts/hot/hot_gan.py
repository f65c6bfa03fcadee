"""A hot spare for a GAN: two functions in turn, a moving average, a schedule, three epochs"""

import copy

import torch
from digests import write_digests
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import outlast

session = outlast.init(hot_spares=True)
torch.manual_seed(1)
generator = DistributedDataParallel(
    nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
)
critic = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.LeakyReLU(), nn.Linear(16, 1)),
    broadcast_buffers=False,
)
average = copy.deepcopy(generator.module)
of_generator = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
of_critic = torch.optim.AdamW(critic.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.StepLR(of_generator, 3, 0.5)
data = TensorDataset(torch.randn(96, 8))
loader = DataLoader(data, 8, sampler=DistributedSampler(data, seed=3), drop_last=True)
state = {"generator": generator, "critic": critic, "average": average}
state |= {"of_generator": of_generator, "of_critic": of_critic}
session.protect(**state, schedule=schedule, loader=loader)
loss_of = nn.functional.binary_cross_entropy_with_logits
history = []


def critic_step(batch):
    (real,) = batch
    of_critic.zero_grad()
    with torch.no_grad():
        fake = generator.module(torch.randn(len(real), 4))
    on_real, on_fake = critic(torch.cat([real, fake])).chunk(2)
    loss = loss_of(on_real, torch.ones_like(on_real)) + loss_of(on_fake, torch.zeros_like(on_fake))
    loss.backward()
    of_critic.step()
    return loss.item()


def generator_step(count):
    of_generator.zero_grad()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    answer = critic(generator(torch.randn(count, 4)))
    loss = loss_of(answer, torch.ones_like(answer))
    loss.backward()
    session.report(loss=loss.item())
    of_generator.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    with torch.no_grad():
        for name, mean in average.named_parameters():
            mean.lerp_(generator.module.get_parameter(name), 0.1)
    return loss.item()


for batch in session.batches(loader, epochs=3):
    history.append(session.run(critic_step, batch))
    if len(history) % 3 == 1:
        history.append(session.run(generator_step, len(batch[0])))
        schedule.step()
write_digests(session, **state, rate=schedule.get_last_lr(), history=history)
